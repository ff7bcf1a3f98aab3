"""The directory: which blocks are published, under which namespace and key.

One radix tree per namespace over whole blocks. A path is the sequence of its blocks' keys: opaque
bytes of one width, of which equal means the same block, so that no two prefixes can be taken for
each other. The keys of a run without a branch lie in one piece and are compared in one go, which is
why a match costs a fraction of a microsecond per *node* and the speed of memory per block.

The directory knows keys and block ids. Where a block lies, who uses it and when it was used last
are others' business; so is the order of eviction, of which it answers what may go: leaves only.
One thread owns a directory. The trees themselves are native: `native/src/directory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay import _native

NO_BLOCK = -1


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


class Outline(NamedTuple):
    """The trees, or the largest part of them: ``n`` runs of blocks without a branch, parents first.

    ``parents`` [n] are indices, -1 for the first of a path; ``blocks`` [n] are a run's own, and
    ``weights`` [n] count those and all below. The first ``counts[0]`` of ``samples`` are blocks of
    run 0, spread evenly over it, the next ``counts[1]`` of run 1, and so on. ``total`` counts the
    blocks of the whole. Not ``exact``: weights are estimates, or more was there than was walked.
    """

    parents: NDArray[np.int32]
    blocks: NDArray[np.int32]
    weights: NDArray[np.int32]
    samples: NDArray[np.int32]
    counts: NDArray[np.int32]
    total: int
    exact: bool


class Directory:
    """Published blocks by namespace and path. Block ids are dense, chosen by the caller.

    ``key_bytes``: width of a block's key. ``run_bytes``: the most key bytes that lie in one piece,
    which bounds what one insert or removal copies. Memory is that of the keys, 20 bytes a block,
    and 60 and up to twice a key a branch. Raises :class:`SettingsError` for keys without width.

    Blocks, where one is asked for: any integer; arrays are of int32 and one-dimensional, or a
    :class:`ProtocolError`.
    """

    def __init__(self, key_bytes: int, run_bytes: int = 64 << 10) -> None:
        self._trees = _native.Directory(key_bytes, run_bytes)

    def __len__(self) -> int:
        """Published blocks."""
        return len(self._trees)

    @property
    def node_count(self) -> int:
        """Nodes of the trees, a root per namespace included: what a match walks is some of them."""
        return self._trees.node_count

    def __contains__(self, block: int) -> bool:
        """Whether the block is published."""
        return block in self._trees

    def match(self, namespace: bytes, keys: bytes, session: Session | None = None) -> Match:
        """The longest published prefix of the path ``keys`` (a whole number of keys).

        Changes nothing: it may be asked any number of times. ``session``: the handle of an earlier
        match, where the walk resumes if that still holds. Raises :class:`ProtocolError` for keys of
        the wrong width.
        """
        ids, block, generation = self._trees.match(namespace, keys, session)
        matched = keys if block != NO_BLOCK else None
        return Match(ids, Session(namespace, block, generation, ids, matched))

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
        then stays the caller's own). It is ``ids`` itself where all of them were added, and a new
        array, read-only, otherwise.

        Raises :class:`ParentMissingError` when a block before ``first`` is not published, and
        :class:`ProtocolError` for keys of the wrong width or too few, and for an id to be added
        that is negative, given twice or published elsewhere. Nothing has changed then.
        """
        return self._trees.insert(namespace, keys, first, ids, session)

    def match_each(self, namespace: bytes, keys: bytes) -> NDArray[np.int32]:
        """For each of ``keys`` the block that is published as a path of it alone, or -1.

        Changes nothing. Raises :class:`ProtocolError` for keys of the wrong width.
        """
        return self._trees.match_each(namespace, keys)

    def insert_each(
        self, namespace: bytes, keys: bytes, ids: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """Publishes each of ``ids`` as a path of one block, that of the key at its place.

        Returns the block that is published at each place, as :meth:`insert` does, read-only. Raises
        :class:`ProtocolError` for keys of the wrong width or another number of them, and for an id
        to be added that is negative or published elsewhere; those before it are published then.
        """
        return self._trees.insert_each(namespace, keys, ids)

    def is_leaf(self, block: int) -> bool:
        """Whether the published block has no published child: it may be removed."""
        return self._trees.is_leaf(block)

    def parent(self, block: int) -> int:
        """The block before this one in its path, or -1 for the first."""
        return self._trees.parent(block)

    def remove_leaf(self, block: int) -> None:
        """Unpublishes a block. Raises :class:`NotLeafError` when a published child exists."""
        self._trees.remove_leaf(block)

    def remove_leaves(self, blocks: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Unpublishes each of ``blocks`` that has no published child when its turn comes, in order.

        Returns which were removed. Raises :class:`ProtocolError` when one is not published; those
        before it are removed then.
        """
        return self._trees.remove_leaves(blocks)

    def remove_subtree(self, block: int) -> NDArray[np.int32]:
        """Unpublishes a block and all its descendants; returns them, children before parents."""
        return self._trees.remove_subtree(block)

    def outline(
        self,
        namespaces: Sequence[bytes] | None,
        max_blocks: int,
        *,
        most_runs: int,
        most_samples: int,
    ) -> Outline:
        """The trees of ``namespaces``, or of all; of many runs the heaviest ``most_runs``.

        Ids are below ``max_blocks``; a run has at most ``most_samples`` of the samples. Takes a
        millisecond or two at most, however much is published.
        """
        return Outline(*self._trees.outline(namespaces, max_blocks, most_runs, most_samples))

    def check(self) -> None:
        """Raises :class:`ProtocolError` where the directory contradicts itself. Slow: for tests."""
        self._trees.check()

    def dump(self) -> bytes:
        """All that it remembers, equal before and after what changed nothing. Slow: for tests."""
        return self._trees.dump()
