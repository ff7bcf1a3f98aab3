"""The pool's memory: where things lie, poison, checksums."""

import numpy as np
import pytest
import torch

from forebay.engine.pool import KVPool
from forebay.errors import SettingsError
from forebay.geometry import Geometry, LayerKV

GEOMETRY = Geometry((LayerKV(2, 8, 2, 6), LayerKV(1, 4, 1, 4)), element_bytes=4, block_tokens=4)


def test_views_lie_where_the_geometry_says():
    pool = KVPool(GEOMETRY, 5)
    pool.blocks.zero_()
    for number, view in enumerate([*pool.keys, *pool.values], start=1):
        view[3] = number
    raw = pool.blocks[3].numpy().view(np.uint8)
    for layer, (keys, values) in enumerate(GEOMETRY.layer_offsets):
        assert raw[keys : keys + 4].view(np.float32)[0] == layer + 1
        assert raw[values : values + 4].view(np.float32)[0] == layer + 3
    assert pool.keys[0].shape == (5, 4, 2, 8)
    assert pool.values[0].shape == (5, 4, 2, 6)
    assert not pool.blocks[[0, 1, 2, 4]].any()
    assert (pool.blocks[3] != 0).all()


def test_given_memory_is_used_in_place():
    memory = np.zeros(3 * GEOMETRY.block_bytes, dtype=np.uint8)
    pool = KVPool(GEOMETRY, 3, memory=memory)
    pool.keys[0][1] = 1.0
    assert pool.base_address == memory.ctypes.data
    assert memory[GEOMETRY.block_bytes : 2 * GEOMETRY.block_bytes].any()
    assert not memory[: GEOMETRY.block_bytes].any()


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


def test_poison_reaches_the_slots_it_is_asked_for():
    pool = KVPool(GEOMETRY, 4)
    pool.blocks.zero_()
    pool.fill_poison([2])
    assert torch.isnan(pool.blocks).all(1).tolist() == [False, False, True, False]
    pool.fill_poison()
    assert torch.isnan(pool.blocks).all()


@pytest.mark.parametrize("block_tokens", [4, 3, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_sees_every_element_and_their_order(block_tokens, dtype):
    geometry = Geometry((LayerKV(1, 3, 1, 2),), dtype.itemsize, block_tokens)
    pool = KVPool(geometry, 40, dtype=dtype)
    pool.blocks.normal_()
    pool.blocks[7] = pool.blocks[30]
    before = pool.checksums(range(40))
    assert before[7] == before[30]
    assert len(set(before.tolist())) == 39
    for element in range(pool.blocks.shape[1]):
        kept = pool.blocks[7, element].clone()
        pool.blocks[7, element] += 1.0
        assert pool.checksums([7])[0] != before[7]
        pool.blocks[7, element] = kept
    half = pool.blocks.shape[1] // 2
    pool.blocks[7] = pool.blocks[7].roll(half)
    assert pool.checksums([7])[0] != before[7]
    assert (pool.checksums(np.array([30, 0], dtype=np.int32)) == before[[30, 0]]).all()
    assert pool.checksums([]).shape == (0,)
