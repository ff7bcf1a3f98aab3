"""One step of the model: chunks of many requests packed into one forward pass.

Prefill chunks and decodes go side by side as one sequence of T tokens; everything but attention
treats tokens alike, and attention keeps them apart (:mod:`forebay.engine.attention`). For given
chunks and pool contents the result does not depend on which slots hold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.engine.attention import DecodeGroup, LayerGate, PagedContext, Scratch, Span
from forebay.engine.models import LoadedModel
from forebay.engine.pool import KVPool
from forebay.engine.threads import limit_threads
from forebay.errors import ModelError, RequestError
from forebay.geometry import Geometry, geometry_from_kv
from forebay.transfer.pinned import PinnedArena

_PADDING_TOKENS = 64
_PADDING_SHARE = 4


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one request.

    `token_ids` int64 ``[n]`` stand at positions ``start..start+n`` of the request; `slots` int32 is
    its block table, root first, covering at least ``start + n`` tokens. The blocks before `start`
    must be written (and their transfers waited for); those from it on are written by the step.
    """

    token_ids: NDArray[np.int64]
    start: int
    slots: NDArray[np.int32]

    @property
    def length(self) -> int:
        """Tokens of context once this chunk is computed."""
        return self.start + len(self.token_ids)


class Runner:
    """Runs steps of one model over one pool. Mutates the pool's slots that the chunks name."""

    def __init__(self, loaded: LoadedModel, pool: KVPool) -> None:
        expected = probe_geometry(loaded, pool.block_tokens)
        if pool.geometry != expected or pool.dtype != loaded.kv_dtype:
            raise ModelError(f"the pool was made for another model than {loaded.name}: {expected}")
        self.loaded = loaded
        self.pool = pool
        self._scratch = Scratch()
        self._rows = _PinnedRows(pool.device.index or 0)
        if pool.device.type == "cpu":
            limit_threads()

    def forward(self, chunks: Sequence[Chunk], gate: LayerGate | None = None) -> torch.Tensor:
        """Computes all chunks in one step; returns float32 ``[len(chunks), vocab]``.

        Row i holds the logits behind chunk i's last token. On CUDA the work is queued on the
        current stream. `gate` is called before each layer's attention; what it raises ends the
        step, of which some layers may have run. Raises RequestError if a chunk is empty, does not
        fit its block table or the model's context, or names a slot or token that does not exist;
        then nothing has run.
        """
        packed = self._pack(chunks)
        packed.context.gate = gate
        return self._run(packed, packed.last_rows).float()

    def on_host(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits` of a step in host memory, once it has run; valid until the next call.

        By way of pinned memory: 4 MB take 0.09 ms to it and 0.37 ms to other memory, on an H200;
        beside saves, behind whose windows they go, 0.39 and 0.68 ms.
        """
        if logits.device.type == "cpu":
            return logits
        host = self._rows.take(len(logits), logits.shape[1])
        host.copy_(logits, non_blocking=True)
        torch.cuda.current_stream(logits.device).synchronize()
        return host

    def forward_all(self, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        """Like :meth:`forward`, but per chunk the logits behind each token, ``[n, vocab]``."""
        packed = self._pack(chunks)
        logits = self._run(
            packed, torch.arange(len(packed.tokens), device=self.pool.device)
        ).float()
        return [
            logits[first : first + len(chunk.token_ids)]
            for first, chunk in zip(packed.firsts, chunks, strict=True)
        ]

    def _run(self, packed: _Packed, keep: torch.Tensor) -> torch.Tensor:
        device = self.pool.device
        with torch.inference_mode():
            result = self.loaded.model(
                input_ids=packed.tokens.unsqueeze(0).to(device),
                position_ids=packed.positions.unsqueeze(0).to(device),
                use_cache=False,
                logits_to_keep=keep,
                attention_context=packed.context,
            )
        return result.logits[0]

    def _pack(self, chunks: Sequence[Chunk]) -> _Packed:
        for chunk in chunks:
            self._check(chunk)
        if not chunks:
            raise RequestError("a step needs at least one chunk")
        order = sorted(range(len(chunks)), key=lambda i: _packing_key(chunks[i]))
        firsts = [0] * len(chunks)
        at = 0
        for i in order:
            firsts[i] = at
            at += len(chunks[i].token_ids)
        ordered = [chunks[i] for i in order]
        starts = np.array([c.start for c in ordered])
        counts = np.array([len(c.token_ids) for c in ordered])
        positions = np.arange(at) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
        last = [first + len(c.token_ids) - 1 for first, c in zip(firsts, chunks, strict=True)]
        return _Packed(
            tokens=torch.from_numpy(np.concatenate([c.token_ids for c in ordered])),
            positions=torch.from_numpy(positions),
            firsts=firsts,
            last_rows=self._index(last),
            context=self._context(ordered, positions, counts),
        )

    def _context(
        self, ordered: Sequence[Chunk], positions: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> PagedContext:
        tokens = self.pool.block_tokens
        write_slots = np.concatenate(
            [c.slots[np.arange(c.start, c.length) // tokens] for c in ordered]
        )
        decodes = [c for c in ordered if len(c.token_ids) == 1]
        groups: list[DecodeGroup] = []
        while decodes[(first := sum(g.count for g in groups)) :]:
            groups.append(self._group(decodes, first))
        firsts = np.cumsum(counts) - counts
        return PagedContext(
            pool=self.pool,
            context_tokens=self.loaded.context_tokens,
            write_slots=self._index(write_slots),
            write_places=self._index(positions % tokens),
            groups=groups,
            spans=[
                self._span(chunk, int(first))
                for chunk, first in zip(ordered, firsts, strict=True)
                if len(chunk.token_ids) > 1
            ],
            scratch=self._scratch,
        )

    def _group(self, decodes: Sequence[Chunk], first: int) -> DecodeGroup:
        """The rows from `first` that are not much shorter; `decodes` come longest first."""
        tokens, longest = self.pool.block_tokens, decodes[first].length
        shortest = longest - max(_PADDING_TOKENS, longest // _PADDING_SHARE)
        rows = [c for c in decodes[first:] if c.length >= shortest]
        per_row = -(-longest // tokens)
        table = np.empty((len(rows), per_row), dtype=np.int64)
        for row, chunk in zip(table, rows, strict=True):
            used = -(-chunk.length // tokens)
            row[:used], row[used:] = chunk.slots[:used], chunk.slots[0]
        lengths = np.array([c.length for c in rows])
        beyond = np.arange(per_row * tokens) >= lengths[:, None]
        mask = torch.from_numpy(~beyond[:, None, None, :longest]).to(self.pool.device)
        return DecodeGroup(
            first=first,
            count=len(rows),
            longest=longest,
            blocks=self._index(table.ravel()),
            beyond=self._index(np.flatnonzero(beyond)),
            mask=None if lengths.min() == longest else mask,
        )

    def _span(self, chunk: Chunk, first: int) -> Span:
        count, length = len(chunk.token_ids), chunk.length
        if chunk.start == 0:
            return Span(first, count, length, None, None)
        mask = torch.ones(count, length, dtype=torch.bool, device=self.pool.device)
        blocks = chunk.slots[: -(-length // self.pool.block_tokens)]
        return Span(first, count, length, self._index(blocks), mask.tril(chunk.start))

    def _index(self, values: Sequence[int] | NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(self.pool.device)

    def _check(self, chunk: Chunk) -> None:
        ids, slots = chunk.token_ids, chunk.slots
        if not len(ids) or chunk.start < 0:
            raise RequestError("a chunk needs at least one token, at a position from 0 on")
        if chunk.length > self.loaded.context_tokens:
            raise RequestError(
                f"{chunk.length} tokens exceed the model's context of {self.loaded.context_tokens}"
            )
        if ids.min() < 0 or ids.max() >= self.loaded.vocab_size:
            raise RequestError(f"token ids must be in 0..{self.loaded.vocab_size - 1}")
        if len(slots) * self.pool.block_tokens < chunk.length:
            raise RequestError(f"{len(slots)} slots do not cover {chunk.length} tokens")
        if slots.min() < 0 or slots.max() >= self.pool.slots:
            raise RequestError(f"slots must be in 0..{self.pool.slots - 1}")


@dataclass(frozen=True, slots=True)
class _Packed:
    tokens: torch.Tensor
    positions: torch.Tensor
    firsts: list[int]
    last_rows: torch.Tensor
    context: PagedContext


class _PinnedRows:
    """Rows of float32 in pinned memory, for a device of that index.

    Not PyTorch's: that gives pinned memory back by an event of the device, and where the device
    broke the process ends there and then.
    """

    def __init__(self, device_index: int) -> None:
        self._device_index = device_index
        self._arena: PinnedArena | None = None
        self._memory: torch.Tensor | None = None

    def take(self, rows: int, columns: int) -> torch.Tensor:
        """``[rows, columns]``; what was taken before must not be used any more."""
        count = rows * columns
        if self._memory is None or len(self._memory) < count:
            most = max(count, 0 if self._memory is None else 2 * len(self._memory))
            size_bytes = 4 * most
            # No copy may cross a registration: there is one.
            arena = PinnedArena(size_bytes, size_bytes, device_index=self._device_index)
            self._arena, self._memory = arena, torch.from_numpy(arena.bytes).view(torch.float32)
        return self._memory[:count].view(rows, columns)


def _packing_key(chunk: Chunk) -> tuple[bool, int]:
    """Decodes first, longest first: neighbours in the batch can be attended together."""
    return len(chunk.token_ids) > 1, -chunk.length


def probe_geometry(loaded: LoadedModel, block_tokens: int | None = None) -> Geometry:
    """The geometry of the K and V this model handed to attention when it was loaded.

    `block_tokens` None takes the default of :func:`forebay.geometry.default_block_tokens`.
    """
    return geometry_from_kv(
        loaded.kv_shapes, element_bytes=loaded.kv_dtype.itemsize, block_tokens=block_tokens
    )
