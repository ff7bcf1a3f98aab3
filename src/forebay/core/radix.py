"""Storage of the directory's tree: nodes and blocks as numbered rows of columns.

A node is a run of blocks without a branch: their keys joined in one ``bytes``, their ids packed in
another. Nodes refer to each other by number, so that there are no cycles and no objects per node
that Python's cyclic garbage collector has to walk: a full collection takes 17 ns a node and column
here, 119 ns a node with an object for each (measured with a million nodes), and nothing at all in a
process that called ``gc.freeze()`` after it made the directory.

A run is bounded in bytes, and so is what one change of shape copies. Removing a branch joins the
two nodes it leaves in line, if they fit in one: what branched once is not slower for ever.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

ID_BYTES = 4
"""Bytes of a packed block id (native ``int32``)."""

NO_NODE = -1
_FIRST_ROWS = 64

Fan = dict[bytes, int]
"""The children of a node, by the key of their first block."""

LEAF: Fan = {}
"""What all leaves have for a fan. Never written."""


class Blocks:
    """Per block id: the node that holds it, its depth in the path, and which insert published it.

    ``node`` is :data:`NO_NODE` for a block that is not published, of which the others mean nothing;
    ``depth`` counts from the root of the namespace; ``insert`` is a number that no other insert
    has. The ``*_at`` views read and write the same memory one block at a time.
    """

    def __init__(self) -> None:
        self._adopt(
            np.full(_FIRST_ROWS, NO_NODE, np.int32),
            np.zeros(_FIRST_ROWS, np.int32),
            np.zeros(_FIRST_ROWS, np.int64),
        )

    def __len__(self) -> int:
        """Rows there are: ids from here on were never published."""
        return len(self.node)

    def grow(self, rows: int) -> None:
        """Makes room for ids below ``rows``."""
        old = len(self.node)
        if rows <= old:
            return
        added = max(rows, old + old // 2) - old
        self._adopt(
            np.concatenate([self.node, np.full(added, NO_NODE, np.int32)]),
            np.concatenate([self.depth, np.zeros(added, np.int32)]),
            np.concatenate([self.insert, np.zeros(added, np.int64)]),
        )

    def _adopt(
        self, node: NDArray[np.int32], depth: NDArray[np.int32], insert: NDArray[np.int64]
    ) -> None:
        self.node, self.depth, self.insert = node, depth, insert
        self.node_at, self.depth_at, self.insert_at = node.data, depth.data, insert.data


class Nodes:
    """The columns of the nodes, and the changes of shape that keep them and ``blocks`` consistent.

    Columns, by node number: ``parent`` (:data:`NO_NODE` for a root), ``start`` (depth of the first
    block), ``segment`` (keys), ``ids`` (packed ids), ``fan`` (children; :data:`LEAF` if there are
    none) and ``recent`` (the child through which the last insert went, :data:`NO_NODE` for a leaf:
    the one to try first, since a path just inserted is the likeliest to be asked for). A root has
    an empty segment and a fan of its own, any other node at least one block. Numbers of dropped
    nodes are used again. ``run_blocks``: the most blocks in a node.
    """

    def __init__(self, key_bytes: int, run_blocks: int, blocks: Blocks) -> None:
        self.key_bytes = key_bytes
        self.run_blocks = run_blocks
        self.blocks = blocks
        self.parent = array("i")
        self.start = array("i")
        self.segment: list[bytes] = []
        self.ids: list[bytes] = []
        self.fan: list[Fan] = []
        self.recent: list[int] = []
        self.free = array("i")

    def add_root(self) -> int:
        """A new node without a parent."""
        return self._add(NO_NODE, 0, b"", b"", {})

    @property
    def count(self) -> int:
        """Nodes in use."""
        return len(self.parent) - len(self.free)

    def is_root(self, node: int) -> bool:
        """Whether the node is the (empty) front of a namespace."""
        return self.parent[node] == NO_NODE

    def length(self, node: int) -> int:
        """Blocks in the node."""
        return len(self.ids[node]) // ID_BYTES

    def block_ids(self, node: int) -> NDArray[np.int32]:
        """The node's block ids, root first; read-only."""
        return np.frombuffer(self.ids[node], np.int32)

    def drop(self, node: int) -> None:
        """Gives the number of a node back to which nothing refers."""
        self.segment[node] = self.ids[node] = b""
        self.bare(node)
        self.free.append(node)

    def bare(self, node: int) -> None:
        """Makes a leaf of ``node``, whose children are gone or will be."""
        self.fan[node] = LEAF
        self.recent[node] = NO_NODE

    def append(self, node: int, keys: bytes, at: int, ids: NDArray[np.int32]) -> None:
        """Puts blocks ``ids``, whose keys are ``keys[at:]``, behind the last block of ``node``.

        They go into the node itself while it is a leaf with room, then into new ones below.
        """
        width = self.key_bytes
        if self.fan[node] is LEAF and (room := self.run_blocks - self.length(node)):
            run, ids = ids[:room], ids[room:]
            self.segment[node] += keys[at : at + len(run) * width]
            self.ids[node] += run.tobytes()
            self.blocks.node.put(run, node)
            at += len(run) * width
        while len(ids):
            run, ids = ids[: self.run_blocks], ids[self.run_blocks :]
            segment = keys[at : at + len(run) * width]
            start = self.start[node] + self.length(node)
            child = self._add(node, start, segment, run.tobytes(), LEAF)
            if self.fan[node] is LEAF:
                self.fan[node] = {}
            # One object serves as segment and as key where the node is a single block.
            self.fan[node][segment if len(run) == 1 else segment[:width]] = child
            self.blocks.node.put(run, child)
            node = child
            at += len(segment)
        while (parent := self.parent[node]) != NO_NODE:
            self.recent[parent] = node
            node = parent

    def split(self, node: int, length: int) -> int:
        """Cuts the first ``length`` blocks of ``node`` off into a new node above it; returns that.

        ``node`` keeps the rest and its children. The caller appends to the new node at once.
        """
        at = length * self.key_bytes
        segment, ids = self.segment[node], self.ids[node]
        lower = segment[at:]
        upper = self._add(
            self.parent[node],
            self.start[node],
            segment[:at],
            ids[: length * ID_BYTES],
            {lower[: self.key_bytes]: node},
        )
        self._replace_in_parent(node, upper)
        self.segment[node] = lower
        self.ids[node] = ids[length * ID_BYTES :]
        self.start[node] += length
        self.parent[node] = upper
        self.blocks.node.put(self.block_ids(upper), upper)
        return upper

    def cut(self, node: int, length: int) -> None:
        """Shortens ``node``, a leaf and no root, to its first ``length`` blocks.

        With none left the node goes. A root stays, even without children.
        """
        if length:
            self.segment[node] = self.segment[node][: length * self.key_bytes]
            self.ids[node] = self.ids[node][: length * ID_BYTES]
            return
        parent = self.parent[node]
        fan = self.fan[parent]
        del fan[self.segment[node][: self.key_bytes]]
        self.drop(node)
        if self.recent[parent] == node:
            self.recent[parent] = next(iter(fan.values()), NO_NODE)
        if self.is_root(parent):
            return
        if not fan:
            self.bare(parent)
        elif len(fan) == 1:
            (child,) = fan.values()
            if self.length(parent) + self.length(child) <= self.run_blocks:
                self._join(parent, child)

    def _join(self, node: int, child: int) -> None:
        """Puts the blocks of ``node`` in front of those of its only child, and drops ``node``."""
        self._replace_in_parent(node, child)
        self.blocks.node.put(self.block_ids(node), child)
        self.segment[child] = self.segment[node] + self.segment[child]
        self.ids[child] = self.ids[node] + self.ids[child]
        self.start[child] = self.start[node]
        self.parent[child] = self.parent[node]
        self.drop(node)

    def _replace_in_parent(self, node: int, other: int) -> None:
        parent = self.parent[node]
        self.fan[parent][self.segment[node][: self.key_bytes]] = other
        if self.recent[parent] == node:
            self.recent[parent] = other

    def _add(self, parent: int, start: int, segment: bytes, ids: bytes, fan: Fan) -> int:
        if not self.free:
            self.parent.append(parent)
            self.start.append(start)
            self.segment.append(segment)
            self.ids.append(ids)
            self.fan.append(fan)
            self.recent.append(NO_NODE)
            return len(self.parent) - 1
        node = self.free.pop()
        self.parent[node] = parent
        self.start[node] = start
        self.segment[node] = segment
        self.ids[node] = ids
        self.fan[node] = fan
        return node
