"""What must hold between any two steps of a toy engine: the books, and the bytes in every tier."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
from numpy.typing import NDArray
from vllm_toy import BLOCK_BYTES, BLOCK_TOKENS, ToyEngine

from forebay.core.slots import SlotState
from forebay.vllm.scheduler.pool import VllmDevicePool


class Watched:
    """Knows what is to be in each block of `engine`, by vLLM's hash of it and its group."""

    def __init__(self, engine: ToyEngine) -> None:
        self._engine = engine
        self._content: dict[tuple[bytes, int], NDArray[np.int64]] = {}
        self._known: dict[str, int] = {}

    def check_books(self) -> None:
        """Where a block is in the books vLLM has it cached, and its queue of free blocks holds
        those that nobody uses, each once.
        """
        pool, device = self._engine.pool, self._engine.half._device
        self._engine.half._catch_up()
        blocks = device._books.all_blocks()
        states, slots = device.state(blocks).tolist(), device.slot_of(blocks).tolist()
        for block, state, slot in zip(blocks.tolist(), states, slots, strict=True):
            there = pool.blocks[slot]
            named = None if there.block_hash is None else _split(there.block_hash)
            if state == SlotState.LOADING:
                assert there.ref_cnt > 0
                assert named in (None, content_of(device, block))
            elif not device.given_up(np.array([block], np.int32)):
                assert named == content_of(device, block)
        queue = pool.free_block_queue
        free = [block.block_id for block in queue.get_all_free_blocks()]
        back, at = [], queue.fake_free_list_tail
        while (at := at.prev_free_block) is not queue.fake_free_list_head:
            back.append(at.block_id)
        unused = [each.block_id for each in pool.blocks if not (each.ref_cnt or each.is_null)]
        assert free == back[::-1]
        assert len(free) == queue.num_free_blocks
        assert sorted(free) == unused

    def check_device(self) -> None:
        """All that vLLM finds is right, if no step and no load that it counts on is under way."""
        if self._engine._scheduled or any(
            worker.worker_half._expected for worker in self._engine.workers
        ):
            return
        self._learn()
        cached = [block for block in self._engine.pool.blocks if block.block_hash is not None]
        for block in cached:
            want = self._content[_split(block.block_hash)]
            assert (self._engine._content[:, block.block_id] == want).all()

    def check_host(self) -> None:
        """All that can be loaded is right, at each worker."""
        self._learn()
        store, device = self._engine.half._store, self._engine.half._device
        published = store._published.numbers()
        saved = published[store.host.valid(published)]
        slots = store.host.slot_of(saved).tolist()
        for worker, layers in zip(self._engine.workers, self._engine.layers, strict=True):
            base = worker.worker_half._host.pool.base_address
            size = len(layers) * BLOCK_BYTES
            for block, slot in zip(saved.tolist(), slots, strict=True):
                there = np.frombuffer(ctypes.string_at(base + slot * size, size), np.int64)
                want = self._content[content_of(device, block)]
                assert (there.reshape(len(layers), -1) == want).all()

    def _learn(self) -> None:
        for name, asked in self._engine.asked.items():
            hashes = asked.request.block_hashes
            if self._known.get(name) == len(hashes):
                continue
            self._known[name] = len(hashes)
            # As the model sees them.
            tokens = itertools.chain(asked.prompt, asked.request.output_token_ids)
            whole = itertools.islice(tokens, len(hashes) * BLOCK_TOKENS)
            for group, kv in enumerate(self._engine.kv_of(asked, whole)):
                blocks = np.array(kv, np.int64).reshape(-1, BLOCK_TOKENS)
                keys = ((each, group) for each in hashes)
                self._content.update(zip(keys, blocks, strict=True))


def content_of(device: VllmDevicePool, block: int) -> tuple[bytes, int]:
    """vLLM's hash of what is in `block`, and the number of its group."""
    contents = device._contents
    group = contents._path if contents._group is None else int(contents._group[block])
    return contents.hash_of(block), group


def _split(key: bytes) -> tuple[bytes, int]:
    """The hash and the group that vLLM names a block by."""
    return key[:-4], int.from_bytes(key[-4:], "big")
