"""The pool's memory: where things lie, poison, checksums."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from forebay.config import KVLayout
from forebay.engine.pool import KVPool
from forebay.errors import SettingsError
from forebay.geometry import Geometry, LayerKV

GEOMETRY = Geometry((LayerKV(2, 8, 2, 6), LayerKV(1, 4, 1, 4)), element_bytes=4, block_tokens=4)


def row(pool: KVPool, slot: int) -> NDArray[np.uint8]:
    """The bytes of a block, part by part."""
    return np.concatenate([part[slot].numpy().view(np.uint8) for part in pool.parts])


@pytest.mark.parametrize("layout", KVLayout)
def test_views_lie_where_the_geometry_says(layout):
    pool = KVPool(GEOMETRY, 5, layout=layout)
    for part in pool.parts:
        part.zero_()
    for number, view in enumerate([*pool.keys, *pool.values], start=1):
        view[3] = number
    raw = row(pool, 3)
    for layer, (keys, values) in enumerate(GEOMETRY.layer_offsets):
        assert raw[keys : keys + 4].view(np.float32)[0] == layer + 1
        assert raw[values : values + 4].view(np.float32)[0] == layer + 3
    assert pool.keys[0].shape == (5, 4, 2, 8)
    assert pool.values[0].shape == (5, 4, 2, 6)
    assert not any(row(pool, slot).any() for slot in (0, 1, 2, 4))
    assert (raw.view(np.float32) != 0).all()


def test_each_layout_is_what_its_name_says():
    block = KVPool(GEOMETRY, 5)
    assert [part.shape for part in block.parts] == [(5, GEOMETRY.block_bytes // 4)]
    assert block.keys[0].stride(0) == GEOMETRY.block_bytes // 4
    layer = KVPool(GEOMETRY, 5, layout=KVLayout.LAYER_FIRST)
    assert len(layer.parts) == 4
    assert all(view.is_contiguous() for view in (*layer.keys, *layer.values))


@pytest.mark.parametrize("layout", KVLayout)
def test_given_memory_is_used_in_place(layout):
    memory = np.zeros(3 * GEOMETRY.block_bytes, dtype=np.uint8)
    pool = KVPool(GEOMETRY, 3, layout=layout, memory=memory)
    pool.keys[0][1] = 1.0
    assert pool.parts[0].data_ptr() == memory.ctypes.data
    assert memory.view(np.float32).sum() == 4 * 2 * 8
    assert row(pool, 1).any()
    assert not row(pool, 0).any()
    assert not row(pool, 2).any()


@pytest.mark.parametrize(
    "settings",
    [
        {"slots": 0},
        {"slots": 2, "dtype": torch.bfloat16},
        {"slots": 2, "memory": np.zeros(GEOMETRY.block_bytes, dtype=np.uint8)},
        {"slots": 2, "memory": torch.zeros(2, GEOMETRY.block_bytes, dtype=torch.uint8)},
    ],
)
def test_sizes_that_do_not_fit_are_refused(settings):
    with pytest.raises(SettingsError):
        KVPool(GEOMETRY, **settings)


@pytest.mark.parametrize("layout", KVLayout)
def test_poison_reaches_the_slots_it_is_asked_for(layout):
    pool = KVPool(GEOMETRY, 4, layout=layout)
    for part in pool.parts:
        part.zero_()
    pool.fill_poison([2])
    for part in pool.parts:
        assert torch.isnan(part).all(1).tolist() == [False, False, True, False]
    pool.fill_poison()
    assert all(torch.isnan(part).all() for part in pool.parts)


@pytest.mark.parametrize("layout", KVLayout)
@pytest.mark.parametrize("block_tokens", [4, 3, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_sees_every_element_and_their_order(layout, block_tokens, dtype):
    geometry = Geometry((LayerKV(1, 3, 1, 2), LayerKV(1, 2, 1, 2)), dtype.itemsize, block_tokens)
    pool = KVPool(geometry, 40, layout=layout, dtype=dtype)
    for part in pool.parts:
        part.normal_()
        part[7] = part[30]
    before = pool.checksums(range(40))
    assert before[7] == before[30]
    assert len(set(before.tolist())) == 39
    for part in pool.parts:
        for element in range(part.shape[1]):
            kept = part[7, element].clone()
            part[7, element] += 1.0
            assert pool.checksums([7])[0] != before[7]
            part[7, element] = kept
        kept = part[7].clone()
        part[7] = kept.roll(part.shape[1] // 2)
        assert pool.checksums([7])[0] != before[7]
        part[7] = kept
    assert (pool.checksums(np.array([30, 0], dtype=np.int32)) == before[[30, 0]]).all()
    assert pool.checksums([]).shape == (0,)


def test_the_same_block_has_the_same_checksum_in_either_layout():
    block, layer = KVPool(GEOMETRY, 3), KVPool(GEOMETRY, 3, layout=KVLayout.LAYER_FIRST)
    block.parts[0].normal_()
    for into, out in zip((*layer.keys, *layer.values), (*block.keys, *block.values), strict=True):
        into.copy_(out)
    assert (layer.checksums(range(3)) == block.checksums(range(3))).all()
