"""The directory: which blocks are published, under which namespace and key.

One radix tree per namespace over whole blocks. A path is the sequence of its blocks' keys: opaque
bytes of one width, of which equal means the same block, so that nothing is hashed to a name and no
two prefixes can be taken for each other. The keys of a run without a branch lie in one ``bytes``
and are compared in one ``startswith``, which is why a match costs microseconds per *node* and the
speed of memory per block.

The directory knows keys and block ids. Where a block lies, who uses it and when it was used last
are others' business; so is the order of eviction, of which it answers what may go: leaves only.
One thread owns a directory.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.core.radix import ID_BYTES, NO_NODE, Blocks, Nodes
from forebay.core.radix_check import check_nodes
from forebay.errors import NotLeafError, ParentMissingError, ProtocolError, SettingsError

NO_BLOCK = -1

_NO_NODE_BYTES = NO_NODE.to_bytes(ID_BYTES, sys.byteorder, signed=True)
_NO_IDS = np.frombuffer(b"", np.int32)


class Session(NamedTuple):
    """Where a match ended, to resume there when the same path comes again, longer.

    Holds nothing in the directory. It may outlive what it points at: that a block was removed, and
    its id perhaps used again, shows in ``generation``. It is always safe to pass: given other keys,
    or a block that is gone, the match starts at the root.

    ``keys`` are those that were matched. With them a longer path is told by one comparison to be
    the same at its front, and by none at all when the very same object is passed again, as for a
    request that waits. They may be large: :meth:`rested` is the handle to keep for a conversation
    that is idle.
    """

    namespace: bytes
    block: int
    generation: int
    ids: NDArray[np.int32]
    keys: bytes | None

    def rested(self) -> Session:
        """The same handle without the keys: its next match compares with the tree, node by node."""
        return self._replace(keys=None)


class Match(NamedTuple):
    """The published blocks at the front of a path: ``ids``, root first, read-only, and a handle."""

    ids: NDArray[np.int32]
    session: Session


class Directory:
    """Published blocks by namespace and path. Block ids are dense, chosen by the caller.

    ``key_bytes``: width of a block's key. ``run_bytes``: the most key bytes that lie in one piece,
    which bounds what one insert or removal copies. Memory is that of the keys, 16 to 20 bytes a
    block, and a few hundred a branch; columns by block id grow with the largest ever published.
    """

    def __init__(self, key_bytes: int, run_bytes: int = 64 << 10) -> None:
        if key_bytes < 1:
            raise SettingsError(f"key_bytes={key_bytes}: a block's key has at least one byte")
        self._key_bytes = key_bytes
        self._blocks = Blocks()
        self._nodes = Nodes(key_bytes, max(1, run_bytes // key_bytes), self._blocks)
        self._roots: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._published = 0
        self._inserts = 0

    def __len__(self) -> int:
        """Published blocks."""
        return self._published

    @property
    def node_count(self) -> int:
        """Nodes of the trees, a root per namespace included: what a match walks is some of them."""
        return self._nodes.count

    def __contains__(self, block: int) -> bool:
        """Whether the block is published."""
        return 0 <= block < len(self._blocks) and self._blocks.node_at[block] != NO_NODE

    def match(self, namespace: bytes, keys: bytes, session: Session | None = None) -> Match:
        """The longest published prefix of the path ``keys`` (a whole number of keys).

        Changes nothing: it may be asked any number of times. ``session``: the handle of an earlier
        match, where the walk resumes if that still holds. Raises :class:`ProtocolError` for keys of
        the wrong width.
        """
        self._require_whole(keys)
        _, _, ids = self._find(namespace, keys, len(keys), session)
        if not len(ids):
            return Match(ids, Session(namespace, NO_BLOCK, 0, ids, None))
        block = int(ids[-1])
        return Match(ids, Session(namespace, block, self._blocks.insert_at[block], ids, keys))

    def insert(
        self,
        namespace: bytes,
        keys: bytes,
        first: int,
        ids: NDArray[np.int32],
        session: Session | None = None,
    ) -> NDArray[np.int32]:
        """Publishes ``ids`` as blocks ``first``, ``first + 1``, ... of the path ``keys``.

        ``keys`` may go on behind the last of them. Returns the block that is published at each
        place: the given one where it was added, another where one was there already (the given one
        then stays the caller's own). The result may be ``ids`` itself.

        Raises :class:`ParentMissingError` when a block before ``first`` is not published, and
        :class:`ProtocolError` for keys of the wrong width or too few, and for an id to be added
        that is negative, given twice or published elsewhere. Nothing has changed then.
        """
        self._require_whole(keys)
        ids = np.ascontiguousarray(ids, np.int32)
        end = (first + ids.size) * self._key_bytes
        if first < 0 or ids.ndim != 1 or end > len(keys):
            raise ProtocolError(
                f"{ids.size} ids from block {first} on do not fit {len(keys)} bytes of keys: "
                f"give one id per block, and the keys of the whole path up to the last"
            )
        node, taken, present = self._find(namespace, keys, end, session)
        found = len(present)
        if found < first:
            raise ParentMissingError(
                f"block {first} of a path needs its ancestors published first, of which only "
                f"{found} are"
            )
        added = ids[found - first :]
        if not len(added):
            return present[first:]
        self._claim(added, found)
        node = self._opened(namespace, node, taken)
        self._nodes.append(node, keys, found * self._key_bytes, added)
        self._published += len(added)
        return ids if found == first else np.concatenate([present[first:], added])

    def is_leaf(self, block: int) -> bool:
        """Whether the published block has no published child: it may be removed."""
        node = self._node(block)
        return not self._nodes.fan[node] and (
            self._above(block, node) + 1 == self._nodes.length(node)
        )

    def parent(self, block: int) -> int:
        """The block before this one in its path, or -1 for the first."""
        node = self._node(block)
        above = self._above(block, node)
        if not above:
            node = self._nodes.parent[node]
            above = self._nodes.length(node)
            if not above:
                return NO_BLOCK
        end = above * ID_BYTES
        return int.from_bytes(self._nodes.ids[node][end - ID_BYTES : end], sys.byteorder)

    def remove_leaf(self, block: int) -> None:
        """Unpublishes a block. Raises :class:`NotLeafError` when a published child exists."""
        if not self.is_leaf(block):
            raise NotLeafError(f"block {block} has a published child: remove that first")
        node = self._blocks.node_at[block]
        self._blocks.node_at[block] = NO_NODE
        self._shorten(node, self._nodes.length(node) - 1, 1)

    def remove_leaves(self, blocks: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Unpublishes each of ``blocks`` that has no published child when its turn comes, in order.

        Returns which were removed. Blocks of one path that follow each other, child before parent,
        cost little more than one of them; a loop over :meth:`remove_leaf` costs the sum. Raises
        :class:`ProtocolError` when one is not published; those before it are removed then.
        """
        removed = np.zeros(len(blocks), np.bool_)
        at = 0
        while at < len(blocks):
            block = int(blocks[at])
            if not self.is_leaf(block):
                at += 1
                continue
            node = self._blocks.node_at[block]
            run = self._nodes.block_ids(node)
            pairs = min(len(run), len(blocks) - at)
            differ = run[: -pairs - 1 : -1] != blocks[at : at + pairs]
            count = int(differ.argmax()) if np.count_nonzero(differ) else pairs
            self._blocks.node.put(blocks[at : at + count], NO_NODE)
            self._shorten(node, len(run) - count, count)
            removed[at : at + count] = True
            at += count
        return removed

    def remove_subtree(self, block: int) -> NDArray[np.int32]:
        """Unpublishes a block and all its descendants; returns them, children before parents."""
        top = self._node(block)
        keep = self._above(block, top)
        nodes = self._nodes
        parts = [nodes.ids[top][keep * ID_BYTES :]]
        pending = list(nodes.fan[top].values())
        nodes.bare(top)
        while pending:
            node = pending.pop()
            parts.append(nodes.ids[node])
            pending.extend(nodes.fan[node].values())
            nodes.drop(node)
        removed = _joined(parts)[::-1].copy()
        self._blocks.node.put(removed, NO_NODE)
        self._shorten(top, keep, len(removed))
        return removed

    def check(self) -> None:
        """Raises :class:`ProtocolError` where the directory contradicts itself. Slow: for tests."""
        check_nodes(self._nodes, set(self._roots.values()), self._published)
        names = {root: name for name, root in self._roots.items()}
        if names != self._names or not all(self._nodes.fan[root] for root in names):
            raise ProtocolError("a namespace without blocks, or under two names")

    def _shorten(self, node: int, keep: int, removed: int) -> None:
        """Cuts a leaf node to ``keep`` blocks, and drops a namespace that is left without any."""
        self._published -= removed
        parent = self._nodes.parent[node]
        self._nodes.cut(node, keep)
        if not keep and self._nodes.is_root(parent) and not self._nodes.fan[parent]:
            del self._roots[self._names.pop(parent)]
            self._nodes.drop(parent)

    def _find(
        self, namespace: bytes, keys: bytes, end: int, session: Session | None
    ) -> tuple[int, int, NDArray[np.int32]]:
        """Follows ``keys[:end]`` as far as it is published.

        Returns the node in which it ends (:data:`NO_NODE` for an unknown namespace), how many of
        that node's blocks lie on the path, and all ids of the path up to there, read-only.
        """
        root = self._roots.get(namespace)
        if root is None:
            return NO_NODE, 0, _NO_IDS
        node = root if session is None else self._anchor(root, namespace, keys, end, session)
        if end < len(keys):
            keys = keys[:end]
        if session is None or node == root:
            return self._descend(root, 0, keys, 0)
        known = len(session.ids)
        start = self._nodes.start[node]
        node, taken, more = self._descend(node, known - start, keys, known * self._key_bytes)
        if not len(more):
            return node, taken, session.ids
        ids = np.concatenate([session.ids, more])
        ids.flags.writeable = False
        return node, taken, ids

    def _anchor(self, root: int, namespace: bytes, keys: bytes, end: int, session: Session) -> int:
        """The node of the session's last block if ``keys[:end]`` leads there, else the root."""
        block = session.block
        if (
            session.namespace != namespace
            or len(session.ids) * self._key_bytes > end
            or block not in self
            or self._blocks.insert_at[block] != session.generation
        ):
            return root
        last: int = self._blocks.node_at[block]
        known = len(session.ids) * self._key_bytes
        if session.keys is not None:
            same = session.keys is keys or keys.startswith(memoryview(session.keys)[:known])
            return last if same else root
        nodes = self._nodes
        at = nodes.start[last] * self._key_bytes
        if not keys.startswith(memoryview(nodes.segment[last])[: known - at], at):
            return root
        node = nodes.parent[last]
        while node != root:
            segment = nodes.segment[node]
            at -= len(segment)
            if not keys.startswith(segment, at):
                return root
            node = nodes.parent[node]
        return last

    def _descend(
        self, node: int, taken: int, keys: bytes, at: int
    ) -> tuple[int, int, NDArray[np.int32]]:
        """Follows ``keys[at:]`` from behind the first ``taken`` blocks of ``node``.

        Returns the node in which it ends, how many of that node's blocks lie on the path, and the
        ids of the blocks passed.
        """
        width = self._key_bytes
        nodes = self._nodes
        recent, fans, segments, ids = nodes.recent, nodes.fan, nodes.segment, nodes.ids
        parts: list[bytes] = []
        segment = segments[node]
        if taken * width < len(segment):
            agreed = taken + self._agreement(segment, taken, keys, at)
            parts.append(ids[node][taken * ID_BYTES : agreed * ID_BYTES])
            if agreed * width < len(segment):
                return node, agreed, _joined(parts)
            at += len(segment) - taken * width
        try:
            while (child := recent[node]) != NO_NODE:
                segment = segments[child]
                if not keys.startswith(segment, at):
                    # Behind the last key the slice is empty, and a key of no fan.
                    child = fans[node][keys[at : at + width]]
                    segment = segments[child]
                    if not keys.startswith(segment, at):
                        agreed = self._agreement(segment, 0, keys, at)
                        parts.append(ids[child][: agreed * ID_BYTES])
                        return child, agreed, _joined(parts)
                node = child
                parts.append(ids[node])
                at += len(segment)
        except KeyError:
            pass
        return node, nodes.length(node), _joined(parts)

    def _agreement(self, segment: bytes, skip: int, keys: bytes, at: int) -> int:
        """Blocks of ``segment``, from block ``skip`` on, that equal ``keys[at:]``. A bisection."""
        width = self._key_bytes
        view = memoryview(segment)[skip * width :]
        low, high = 0, min(len(view), len(keys) - at) // width
        while low < high:
            middle = (low + high + 1) // 2
            if keys.startswith(view[low * width : middle * width], at + low * width):
                low = middle
            else:
                high = middle - 1
        return low

    def _claim(self, added: NDArray[np.int32], depth: int) -> None:
        """Takes ids into use from ``depth`` on, or raises with nothing changed."""
        blocks = self._blocks
        try:
            # Read without its sign, a negative id is beyond any table.
            held = blocks.node.take(added.view(np.uint32))
        except IndexError:
            if int(added.min()) < 0:
                raise ProtocolError("a block id is negative: ids count from 0") from None
            blocks.grow(int(added.max()) + 1)
            held = blocks.node.take(added)
        if held.tobytes() != _NO_NODE_BYTES * len(added):
            raise ProtocolError(
                f"block {added[held != NO_NODE][0]} is published already, at another place"
            )
        # Of an id given twice only the last depth stays. Depths of unpublished blocks mean nothing.
        depths = np.arange(depth, depth + len(added), dtype=np.int32)
        blocks.depth.put(added, depths)
        if blocks.depth.take(added).tobytes() != depths.tobytes():
            raise ProtocolError("a block id was given twice: each place of a path has its own")
        self._inserts += 1
        blocks.insert.put(added, self._inserts)

    def _opened(self, namespace: bytes, node: int, taken: int) -> int:
        """The node that ends behind the first ``taken`` blocks of ``node``, made if need be."""
        if node == NO_NODE:
            node = self._nodes.add_root()
            self._roots[namespace] = node
            self._names[node] = namespace
            return node
        return self._nodes.split(node, taken) if taken < self._nodes.length(node) else node

    def _require_whole(self, keys: bytes) -> None:
        # A buffer that can change would make the "same object" test of a session a lie.
        if type(keys) is not bytes or len(keys) % self._key_bytes:
            raise ProtocolError(
                f"keys must be bytes, a whole number of {self._key_bytes}-byte block keys; "
                f"got {type(keys).__name__} of {len(keys)}"
            )

    def _node(self, block: int) -> int:
        if block not in self:
            raise ProtocolError(f"block {block} is not published")
        return self._blocks.node_at[block]

    def _above(self, block: int, node: int) -> int:
        """Blocks of the node before this one."""
        return self._blocks.depth_at[block] - self._nodes.start[node]


def _joined(parts: list[bytes]) -> NDArray[np.int32]:
    """Packed ids as one array, read-only; of a single part without a copy."""
    return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), np.int32)
