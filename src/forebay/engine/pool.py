"""The device pool of the reference engine: one tensor, a block contiguous in memory.

A block lies as ``[layer, K/V, token, head, dim]`` (see :mod:`forebay.geometry`), so that moving it
is one copy. Attention sees one layer of all blocks at once, through strided views of the same
memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.errors import SettingsError
from forebay.geometry import Geometry

_WEIGHT_SEED = 0x5EED
_CHECKSUM_BLOCKS = 16


class KVPool:
    """Slots for blocks in one tensor, allocated here or laid over memory that is given.

    ``memory`` is a flat uint8 tensor or array of exactly ``slots * geometry.block_bytes`` bytes,
    kept alive by the pool and written by it; None allocates. Fresh memory is not cleared: whoever
    reads a slot must have written it.

    Raises :class:`SettingsError` if sizes or dtype do not fit.
    """

    def __init__(
        self,
        geometry: Geometry,
        slots: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        memory: torch.Tensor | NDArray[np.uint8] | None = None,
    ) -> None:
        if slots < 1:
            raise SettingsError(f"a pool needs at least one slot, not {slots}")
        if dtype.itemsize != geometry.element_bytes:
            raise SettingsError(
                f"{dtype} has {dtype.itemsize} bytes, the geometry says {geometry.element_bytes}"
            )
        total_bytes = slots * geometry.block_bytes
        if memory is None:
            memory = torch.empty(total_bytes, dtype=torch.uint8, device=device)
        flat = torch.from_numpy(memory) if isinstance(memory, np.ndarray) else memory
        if flat.dtype != torch.uint8 or flat.shape != (total_bytes,) or not flat.is_contiguous():
            raise SettingsError(
                f"{slots} slots of {geometry.block_bytes} B need {total_bytes} contiguous bytes, "
                f"not {tuple(flat.shape)} of {flat.dtype}"
            )
        self.geometry = geometry
        self.slots = slots
        self.block_tokens = geometry.block_tokens
        self.dtype = dtype
        self._bytes = flat.view(slots, geometry.block_bytes)
        self.blocks = flat.view(dtype).view(slots, -1)
        """All slots, ``[slots, elements of a block]``."""
        self.keys, self.values = _layer_views(self.blocks, geometry)
        """Per layer a view ``[slots, block_tokens, heads, dim]``; K and V heads may differ."""
        self._words, self._weights = _checksum_views(self._bytes)

    @property
    def device(self) -> torch.device:
        """Where the memory lies."""
        return self.blocks.device

    @property
    def base_address(self) -> int:
        """Address of slot 0; slot s lies ``s * block_bytes`` behind it."""
        return self.blocks.data_ptr()

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, and the stride of slots."""
        return self.geometry.block_bytes

    def fill_poison(self, slots: Sequence[int] | NDArray[np.int32] | None = None) -> None:
        """Fills these slots, or all, with NaN: what must never be read, seen when it is."""
        if slots is None:
            self.blocks.fill_(float("nan"))
        else:
            index = torch.as_tensor(np.asarray(slots, dtype=np.int64), device=self.device)
            self.blocks.index_fill_(0, index, float("nan"))

    def checksums(self, slots: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int64]:
        """One checksum for each of these slots, of all bytes of the block.

        A sum of 64-bit words, each times an odd constant of its place, modulo 2**64: any one
        changed word and any two swapped words change it. Runs behind the work already queued on
        the current stream of the pool's device and waits for it.
        """
        index = torch.as_tensor(np.asarray(slots, dtype=np.int64), device=self.device)
        parts = [
            (self._words.index_select(0, part) * self._weights).sum(1)
            for part in index.split(_CHECKSUM_BLOCKS)
        ]
        if not parts or not len(index):
            return np.empty(0, dtype=np.int64)
        return torch.cat(parts).cpu().numpy()


def _layer_views(
    blocks: torch.Tensor, geometry: Geometry
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    tokens, size = geometry.block_tokens, geometry.element_bytes

    def view(offset_bytes: int, heads: int, dim: int) -> torch.Tensor:
        start = offset_bytes // size
        return blocks[:, start : start + tokens * heads * dim].view(-1, tokens, heads, dim)

    layers = list(zip(geometry.layers, geometry.layer_offsets, strict=True))
    keys = tuple(view(k, kv.key_heads, kv.key_dim) for kv, (k, _) in layers)
    values = tuple(view(v, kv.value_heads, kv.value_dim) for kv, (_, v) in layers)
    return keys, values


def _checksum_views(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks as the widest words that divide them and their address, and a weight per word."""
    places = data.shape[1] | data.data_ptr()
    wide = next(
        d for d in (torch.int64, torch.int32, torch.int16, torch.uint8) if places % d.itemsize == 0
    )
    words = data.view(wide)
    random = np.random.Generator(np.random.PCG64(_WEIGHT_SEED))
    weights = random.integers(-(2**62), 2**62, words.shape[1], dtype=np.int64) | 1
    return words, torch.from_numpy(weights).to(data.device)
