"""How the worker half reads the layouts of vLLM's KV tensors. Needs no vLLM."""

from __future__ import annotations

import logging

import pytest
import torch

from forebay.errors import SettingsError
from forebay.transfer.pool import Pool
from forebay.vllm.adapter import KVShape
from forebay.vllm.worker import device_of, device_pool, parts_of, warn_of_tensors

BLOCKS, TOKENS, HEADS, SIZE, LAYERS = 6, 32, 2, 8, 3
PAGE = TOKENS * HEADS * 2 * SIZE * 2
SHAPE = KVShape(TOKENS, LAYERS * PAGE, BLOCKS)


def layers(*extents: int) -> dict[str, torch.Tensor]:
    return {f"layer {each}": torch.zeros(extents, dtype=torch.bfloat16) for each in range(LAYERS)}


def offsets(pool: Pool) -> list[tuple[int, int]]:
    """Stride and length of each fragment."""
    return [fragment[1:] for fragment in pool.fragments]


@pytest.mark.parametrize("heads_first", [False, True])
def test_one_page_for_each_layer(heads_first: bool):
    """vLLM 0.26 on a GPU: logically [blocks, heads, tokens, K and V], whatever lies in memory."""
    if heads_first:
        caches = layers(BLOCKS, HEADS, TOKENS, 2 * SIZE)
    else:
        stored = layers(BLOCKS, TOKENS, HEADS, 2 * SIZE)
        caches = {name: tensor.permute(0, 2, 1, 3) for name, tensor in stored.items()}
    assert offsets(device_pool(SHAPE, parts_of(SHAPE, caches))) == [(PAGE, PAGE)] * LAYERS


def test_blocks_that_a_kernel_counts_as_two():
    caches = layers(2 * BLOCKS, TOKENS // 2, HEADS, 2 * SIZE)
    assert offsets(device_pool(SHAPE, parts_of(SHAPE, caches))) == [(PAGE, PAGE)] * LAYERS


def test_keys_and_values_apart():
    caches = layers(2, BLOCKS, TOKENS, HEADS, SIZE)
    assert (
        offsets(device_pool(SHAPE, parts_of(SHAPE, caches)))
        == [(PAGE // 2, PAGE // 2)] * 2 * LAYERS
    )


def test_all_layers_of_a_block_side_by_side():
    caches = {"all": torch.zeros((BLOCKS, LAYERS, TOKENS, HEADS, 2 * SIZE), dtype=torch.bfloat16)}
    assert offsets(device_pool(SHAPE, parts_of(SHAPE, caches))) == [(LAYERS * PAGE, LAYERS * PAGE)]


def test_views_into_one_allocation_that_go_by_layer():
    """One tensor of [blocks, layers, ...], of which each layer has a view."""
    whole = torch.zeros((BLOCKS, LAYERS, TOKENS, HEADS, 2 * SIZE), dtype=torch.bfloat16)
    caches = {f"layer {each}": whole[:, each] for each in range(LAYERS)}
    pool = device_pool(SHAPE, parts_of(SHAPE, caches))
    assert pool.fragments == tuple((each * PAGE, LAYERS * PAGE, PAGE) for each in range(LAYERS))


def test_a_layer_that_shares_the_cache_of_another_counts_once():
    caches = layers(BLOCKS, TOKENS, HEADS, 2 * SIZE)
    caches["shares"] = caches["layer 1"]
    assert len(device_pool(SHAPE, parts_of(SHAPE, caches)).fragments) == LAYERS


@pytest.mark.parametrize(
    ("extents", "said"),
    [
        ((TOKENS, HEADS, BLOCKS + 1, 2 * SIZE), "6 blocks are not the outermost axis"),
        ((BLOCKS, TOKENS, HEADS, SIZE), "vLLM says that a block has 6144 bytes"),
    ],
)
def test_a_layout_in_which_blocks_cannot_be_told_is_refused(extents: tuple[int, ...], said: str):
    with pytest.raises(SettingsError, match=said):
        device_pool(SHAPE, parts_of(SHAPE, layers(*extents)))


def test_caches_on_several_devices_are_refused():
    caches = layers(BLOCKS, TOKENS, HEADS, 2 * SIZE)
    assert device_of(caches) == torch.device("cpu")
    caches["elsewhere"] = torch.empty(1, device="meta")
    with pytest.raises(SettingsError, match="one GPU of CUDA or a CPU"):
        device_of(caches)


def test_blocks_in_many_tensors_are_warned_of(caplog: pytest.LogCaptureFixture):
    """And those that lie as scattered in one tensor are not: they are rows of one copy."""
    many = [torch.zeros((BLOCKS, PAGE), dtype=torch.uint8) for _ in range(32)]
    with caplog.at_level(logging.WARNING, "forebay.vllm"):
        warn_of_tensors(torch.zeros((32, BLOCKS, PAGE), dtype=torch.uint8).unbind())
        assert not caplog.records
        warn_of_tensors(many)
    assert "32 tensors" in caplog.text
