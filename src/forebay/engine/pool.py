"""The device pool of the reference engine: the KV of all slots, in one of two layouts.

``BLOCK_FIRST``: a block lies contiguous as ``[layer, K/V, token, head, dim]`` (see
:mod:`forebay.geometry`), so that moving it is one copy. ``LAYER_FIRST``: a layer's K of all slots
lies together, then its V, as paged attention kernels commonly want it; a block is moved as two
fragments a layer. Attention sees one layer of all blocks at once, through views of that memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.config import KVLayout
from forebay.errors import SettingsError
from forebay.geometry import Geometry

_WEIGHT_SEED = 0x5EED
_CHECKSUM_BLOCKS = 16


class KVPool:
    """Slots for blocks in one piece of memory, allocated here or given.

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
        layout: KVLayout = KVLayout.BLOCK_FIRST,
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
        self.device = flat.device
        self.parts = _parts(flat.view(dtype), slots, geometry, layout)
        """Tensors ``[slots, elements]``: a block is its row of each, in the geometry's order."""
        self.keys, self.values = _layer_views(self.parts, geometry)
        """Per layer a view ``[slots, block_tokens, heads, dim]``; K and V heads may differ."""
        self._words = _checksum_views(self.parts, geometry.block_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, over all its parts."""
        return self.geometry.block_bytes

    def fill_poison(self, slots: Sequence[int] | NDArray[np.int32] | None = None) -> None:
        """Fills these slots, or all, with NaN: what must never be read, seen when it is."""
        every = range(self.slots) if slots is None else slots
        index = torch.as_tensor(np.asarray(every, dtype=np.int64), device=self.device)
        for part in self.parts:
            part.index_fill_(0, index, float("nan"))

    def checksums(self, slots: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int64]:
        """One checksum for each of these slots, of all bytes of the block.

        A sum of words, each times an odd constant of its place in the block, modulo 2**64: any one
        changed word and any two swapped words change it. Runs behind the work already queued on
        the current stream of the pool's device and waits for it.
        """
        index = torch.as_tensor(np.asarray(slots, dtype=np.int64), device=self.device)
        sums = [
            torch.stack([(words.index_select(0, some) * by).sum(1) for words, by in self._words])
            for some in index.split(_CHECKSUM_BLOCKS)
        ]
        if not len(index):
            return np.empty(0, dtype=np.int64)
        return torch.cat([each.sum(0) for each in sums]).cpu().numpy()


def _parts(
    flat: torch.Tensor, slots: int, geometry: Geometry, layout: KVLayout
) -> tuple[torch.Tensor, ...]:
    """`flat` [elements of all slots] cut into what one copy can move of a block."""
    if layout is KVLayout.BLOCK_FIRST:
        return (flat.view(slots, -1),)
    sizes = [size // geometry.element_bytes for layer in geometry.fragment_bytes for size in layer]
    return tuple(part.view(slots, -1) for part in flat.split([slots * size for size in sizes]))


def _layer_views(
    parts: tuple[torch.Tensor, ...], geometry: Geometry
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    tokens, size = geometry.block_tokens, geometry.element_bytes

    def view(layer: int, which: int, heads: int, dim: int) -> torch.Tensor:
        if len(parts) == 1:
            start = geometry.layer_offsets[layer][which] // size
            part = parts[0][:, start : start + tokens * heads * dim]
        else:
            part = parts[2 * layer + which]
        return part.view(-1, tokens, heads, dim)

    layers = list(enumerate(geometry.layers))
    keys = tuple(view(layer, 0, kv.key_heads, kv.key_dim) for layer, kv in layers)
    values = tuple(view(layer, 1, kv.value_heads, kv.value_dim) for layer, kv in layers)
    return keys, values


def _checksum_views(
    parts: tuple[torch.Tensor, ...], block_bytes: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each part as the widest words that divide all of them and their addresses, and a weight for
    each word.
    """
    places = 0
    for part in parts:
        places |= part.shape[1] * part.element_size() | part.data_ptr()
    wide = next(
        d for d in (torch.int64, torch.int32, torch.int16, torch.uint8) if places % d.itemsize == 0
    )
    random = np.random.Generator(np.random.PCG64(_WEIGHT_SEED))
    count = block_bytes // wide.itemsize
    weights = random.integers(-(2**62), 2**62, count, dtype=np.int64) | 1
    words = [part.view(wide) for part in parts]
    by = torch.from_numpy(weights).to(parts[0].device).split([each.shape[1] for each in words])
    return list(zip(words, by, strict=True))
