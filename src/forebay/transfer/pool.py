"""Where the slots of a pool lie in memory that somebody else allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay.errors import SettingsError

Fragment = tuple[int, int, int]
"""(offset, stride, bytes): the fragment of slot s lies at `base_address + offset + s * stride`."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool of `slots` blocks. A block's bytes are its fragments, in order.

    No copy crosses a multiple of `seam_bytes` (0: none) from the base: so long is one registration
    of pinned memory, which a copy must not leave. Keeps `owner` alive, whatever holds the memory.
    """

    base_address: int
    slots: int
    fragments: tuple[Fragment, ...]
    seam_bytes: int = 0
    owner: object = field(default=None, repr=False, compare=False)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all fragments."""
        return sum(fragment[2] for fragment in self.fragments)

    @classmethod
    def of(cls, parts: Sequence[Any], *, seam_bytes: int = 0) -> Pool:
        """The pool that lies in `parts`: numpy arrays or torch tensors of shape [slots, ...].

        Each part holds one fragment of every slot, which must be contiguous; the slots may be
        strided. One part makes a pool of contiguous blocks; for KV caches give one part for each
        layer's K and V, in the order the block's bytes have in the other pool.
        Raises `SettingsError` when the parts do not fit together.
        """
        if not parts:
            raise SettingsError("a pool needs at least one part")
        views = [_view(part) for part in parts]
        slots = views[0].slots
        if any(view.slots != slots for view in views):
            raise SettingsError("every part of a pool needs the same number of slots")
        base = min(view.address for view in views)
        fragments = tuple((view.address - base, view.stride, view.bytes) for view in views)
        return cls(base, slots, fragments, seam_bytes, owner=tuple(parts))


@dataclass(frozen=True, slots=True)
class _View:
    address: int
    slots: int
    stride: int
    bytes: int


def _view(part: Any) -> _View:
    if hasattr(part, "data_ptr"):
        size = int(part.element_size())
        strides = [int(stride) * size for stride in part.stride()]
        address = int(part.data_ptr())
    elif hasattr(part, "__array_interface__"):
        size = int(part.itemsize)
        strides = [int(stride) for stride in part.strides]
        address = int(part.__array_interface__["data"][0])
    else:
        raise SettingsError("a part of a pool must be a numpy array or a torch tensor")
    shape = [int(extent) for extent in part.shape]
    if not shape or 0 in shape:
        raise SettingsError("a part of a pool needs shape [slots, ...] and no empty axis")
    expected = size
    for extent, stride in zip(reversed(shape[1:]), reversed(strides[1:]), strict=True):
        if extent > 1 and stride != expected:
            raise SettingsError(
                "the bytes of a slot must be contiguous in each part: pass one part for each piece"
            )
        expected *= extent
    stride = strides[0] if shape[0] > 1 else expected
    return _View(address, shape[0], stride, expected)
