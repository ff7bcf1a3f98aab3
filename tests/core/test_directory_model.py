"""The directory against a model that keeps every published path in a plain dictionary."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from forebay.core.directory import Directory, Session
from forebay.errors import NotLeafError, ParentMissingError, ProtocolError

KEY_BYTES = 2
NAMESPACES = (b"", b"a", b"tenant-b")

paths = st.lists(st.sampled_from([b"xx", b"xy", b"yx"]), max_size=9).map(b"".join)
namespaces = st.sampled_from(NAMESPACES)


class Model:
    """Published paths, each under (namespace, keys up to and with its last block)."""

    def __init__(self) -> None:
        self.block_at: dict[tuple[bytes, bytes], int] = {}
        self.place_of: dict[int, tuple[bytes, bytes]] = {}

    def match(self, namespace: bytes, keys: bytes) -> list[int]:
        found: list[int] = []
        for end in range(KEY_BYTES, len(keys) + 1, KEY_BYTES):
            block = self.block_at.get((namespace, keys[:end]))
            if block is None:
                break
            found.append(block)
        return found

    def add(self, namespace: bytes, keys: bytes, block: int) -> None:
        self.block_at[namespace, keys] = block
        self.place_of[block] = (namespace, keys)

    def remove(self, block: int) -> None:
        del self.block_at[self.place_of.pop(block)]

    def parent(self, block: int) -> int:
        namespace, keys = self.place_of[block]
        return self.block_at.get((namespace, keys[:-KEY_BYTES]), -1)

    def subtree(self, block: int) -> set[int]:
        namespace, keys = self.place_of[block]
        return {
            other
            for other, (its_namespace, its_keys) in self.place_of.items()
            if its_namespace == namespace and its_keys.startswith(keys)
        }

    def is_leaf(self, block: int) -> bool:
        return len(self.subtree(block)) == 1


class DirectoryMachine(RuleBasedStateMachine):
    sessions = Bundle("sessions")

    @initialize(run_blocks=st.integers(1, 4) | st.just(100))
    def start(self, run_blocks: int) -> None:
        self.directory = Directory(KEY_BYTES, run_bytes=run_blocks * KEY_BYTES)
        self.model = Model()
        # Freed ids come back first, so that sessions and columns meet ids with a past.
        self.unused = list(range(199, -1, -1))

    def take(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.array([self.unused.pop() for _ in range(count)], np.int32)

    def give(self, blocks: Iterable[int]) -> None:
        self.unused.extend(blocks)

    def pick(self, position: int) -> int:
        """A published block, or one that is not."""
        published = sorted(self.model.place_of)
        return published[position % len(published)] if published else self.unused[-1]

    @rule(target=sessions, namespace=namespaces, keys=paths, rested=st.booleans())
    def match(self, namespace: bytes, keys: bytes, rested: bool) -> tuple[Session, bytes]:
        before = self.directory.dump()
        match = self.directory.match(namespace, keys)
        assert self.directory.dump() == before
        assert match.ids.tolist() == self.model.match(namespace, keys)
        assert not match.ids.flags.writeable
        return match.session.rested() if rested else match.session, keys

    @rule(target=sessions, session=sessions, namespace=namespaces, more=paths)
    def resume(
        self, session: tuple[Session, bytes], namespace: bytes, more: bytes
    ) -> tuple[Session, bytes]:
        """The same conversation goes on; now and then somebody passes another's handle."""
        handle, keys = session
        keys = keys + more
        before = self.directory.dump()
        match = self.directory.match(namespace, keys, handle)
        assert self.directory.dump() == before
        assert match.ids.tolist() == self.model.match(namespace, keys)
        return match.session, keys

    @rule(session=sessions, keys=paths)
    def resume_elsewhere(self, session: tuple[Session, bytes], keys: bytes) -> None:
        handle, _ = session
        match = self.directory.match(handle.namespace, keys, handle)
        assert match.ids.tolist() == self.model.match(handle.namespace, keys)

    @rule(
        namespace=namespaces,
        keys=paths,
        surplus=paths,
        gap=st.integers(0, 2),
        overlap=st.integers(0, 4),
        session=st.none() | sessions,
    )
    def insert(
        self,
        namespace: bytes,
        keys: bytes,
        surplus: bytes,
        gap: int,
        overlap: int,
        session: tuple[Session, bytes] | None,
    ) -> None:
        """From `overlap` blocks before what is published, or from `gap` behind it."""
        blocks = len(keys) // KEY_BYTES
        found = self.model.match(namespace, keys)
        first = min(blocks, max(0, len(found) + gap - overlap))
        ids = self.take(blocks - first)
        handle = session[0] if session else None
        if len(found) < first:
            before = self.directory.dump()
            with pytest.raises(ParentMissingError):
                self.directory.insert(namespace, keys + surplus, first, ids, handle)
            assert self.directory.dump() == before
            self.give(ids.tolist())
            return
        canonical = self.directory.insert(namespace, keys + surplus, first, ids, handle).tolist()
        assert canonical[: len(found) - first] == found[first:]
        assert canonical[len(found) - first :] == ids.tolist()[len(found) - first :]
        for position in range(len(found), blocks):
            block = int(ids[position - first])
            self.model.add(namespace, keys[: (position + 1) * KEY_BYTES], block)
        self.give(block for block in ids.tolist() if block not in self.model.place_of)

    @rule(namespace=namespaces, keys=paths, position=st.integers(0, 50))
    def insert_a_published_block(self, namespace: bytes, keys: bytes, position: int) -> None:
        block = self.pick(position)
        found = len(self.model.match(namespace, keys))
        if block not in self.model.place_of or found == len(keys) // KEY_BYTES:
            return
        before = self.directory.dump()
        with pytest.raises(ProtocolError):
            self.directory.insert(
                namespace, keys[: (found + 1) * KEY_BYTES], found, np.array([block], np.int32)
            )
        assert self.directory.dump() == before

    @rule(position=st.integers(0, 50))
    def remove_leaf(self, position: int) -> None:
        block = self.pick(position)
        before = self.directory.dump()
        if block not in self.model.place_of:
            with pytest.raises(ProtocolError):
                self.directory.remove_leaf(block)
        elif not self.model.is_leaf(block):
            with pytest.raises(NotLeafError):
                self.directory.remove_leaf(block)
        else:
            self.directory.remove_leaf(block)
            self.model.remove(block)
            self.give([block])
            return
        assert self.directory.dump() == before

    @rule(positions=st.lists(st.integers(0, 50), max_size=6), climb=st.integers(0, 6))
    def remove_leaves(self, positions: list[int], climb: int) -> None:
        """Blocks here and there, each followed by some of its ancestors."""
        blocks: list[int] = []
        for position in positions:
            block = self.pick(position)
            for _ in range(climb + 1):
                if block in self.model.place_of and block not in blocks:
                    blocks.append(block)
                    block = self.model.parent(block)
        removed = self.directory.remove_leaves(np.array(blocks, np.int32)).tolist()
        for block, went in zip(blocks, removed, strict=True):
            assert went == self.model.is_leaf(block)
            if went:
                self.model.remove(block)
                self.give([block])

    @rule(position=st.integers(0, 50))
    def remove_subtree(self, position: int) -> None:
        block = self.pick(position)
        if block not in self.model.place_of:
            with pytest.raises(ProtocolError):
                self.directory.remove_subtree(block)
            return
        expected = self.model.subtree(block)
        removed = self.directory.remove_subtree(block).tolist()
        assert set(removed) == expected
        assert len(removed) == len(expected)
        for gone in removed:
            assert self.model.is_leaf(gone), "a parent came before its child"
            self.model.remove(gone)
        self.give(removed)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "directory"):
            return
        self.directory.check()
        assert len(self.directory) == len(self.model.place_of)
        for block in range(-1, 202):
            assert (block in self.directory) == (block in self.model.place_of)
        for block in self.model.place_of:
            assert self.directory.parent(block) == self.model.parent(block)
            assert self.directory.is_leaf(block) == self.model.is_leaf(block)


TestDirectory = DirectoryMachine.TestCase
TestDirectory.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
