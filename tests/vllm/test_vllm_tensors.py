"""How the worker half reads the layouts of vLLM's KV tensors. Needs no vLLM."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forebay.errors import SettingsError
from forebay.transfer.pool import Pool
from forebay.vllm.adapter import KVShape, read_shape
from forebay.vllm.side_by_side import lay_side_by_side
from forebay.vllm.tensors import device_of, device_pool, parts_of, warn_of_tensors

BLOCKS, TOKENS, HEADS, SIZE, LAYERS = 6, 32, 2, 8, 3
LATENT = 24
PAGE = TOKENS * HEADS * 2 * SIZE * 2
SHAPE = KVShape(TOKENS, LAYERS * PAGE, BLOCKS, LAYERS * PAGE)


def layers(*extents: int) -> dict[str, torch.Tensor]:
    return {f"layer {each}": torch.zeros(extents, dtype=torch.bfloat16) for each in range(LAYERS)}


def offsets(pool: Pool) -> list[tuple[int, int]]:
    """Stride and length of each fragment."""
    return [fragment[1:] for fragment in pool.fragments]


def test_numbers_of_one_byte():
    """A KV cache of fp8: vLLM's tensors are of bytes, and all layers of a block one run of them."""
    shape = KVShape(TOKENS, LAYERS * PAGE // 2, BLOCKS, LAYERS * PAGE // 2)
    whole = torch.zeros((BLOCKS, LAYERS, TOKENS, HEADS, 2 * SIZE), dtype=torch.uint8)
    caches = {f"layer {each}": whole[:, each] for each in range(LAYERS)}
    (part,) = parts_of(shape, caches)
    assert device_pool(shape, [part]).fragments == ((0, LAYERS * PAGE // 2, LAYERS * PAGE // 2),)
    caches = {name: tensor.clone() for name, tensor in caches.items()}
    assert offsets(device_pool(shape, parts_of(shape, caches))) == [(PAGE // 2, PAGE // 2)] * LAYERS


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


@pytest.mark.parametrize("kernel_blocks", [1, 2])
def test_latents_are_in_one_piece(kernel_blocks: int):
    """Of multi-head latent attention, and a kernel may see each block as several."""
    size = TOKENS * LATENT * 2
    shape = KVShape(TOKENS, LAYERS * size, BLOCKS, LAYERS * size)
    blocks, tokens = BLOCKS * kernel_blocks, TOKENS // kernel_blocks
    caches = layers(blocks, tokens, LATENT)
    assert offsets(device_pool(shape, parts_of(shape, caches))) == [(size, size)] * LAYERS
    whole = torch.zeros((blocks, LAYERS, tokens, LATENT), dtype=torch.bfloat16)
    (part,) = parts_of(shape, {"all": whole})
    assert offsets(device_pool(shape, [part])) == [(LAYERS * size, LAYERS * size)]
    whole[kernel_blocks : 2 * kernel_blocks] = 1
    part[2].copy_(part[1])
    found = [bool((block == 1).all()) for block in whole.unflatten(0, (BLOCKS, kernel_blocks))]
    assert found == [False, True, True, *[False] * 3]


def test_layers_of_several_groups_share_memory():
    """One of each group lies where one of the others does, and sees the same blocks."""
    stored = layers(BLOCKS, TOKENS, HEADS, 2 * SIZE)
    window = {f"window {name}": tensor[:] for name, tensor in stored.items()}
    parts = parts_of(SHAPE, stored | window)
    assert offsets(device_pool(SHAPE, parts)) == [(PAGE, PAGE)] * LAYERS
    apart = {name: tensor.view(2, BLOCKS, TOKENS, HEADS, SIZE) for name, tensor in window.items()}
    with pytest.raises(SettingsError, match="lies in the memory of another layer"):
        parts_of(SHAPE, stored | apart)


def test_views_into_one_allocation_that_go_by_layer():
    """One tensor of [blocks, layers, ...], of which each layer has a view."""
    whole = torch.zeros((BLOCKS, LAYERS, TOKENS, HEADS, 2 * SIZE), dtype=torch.bfloat16)
    caches = {f"layer {each}": whole[:, each] for each in range(LAYERS)}
    (part,) = parts_of(SHAPE, caches)
    assert part.data_ptr() == whole.data_ptr()
    assert device_pool(SHAPE, [part]).fragments == ((0, LAYERS * PAGE, LAYERS * PAGE),)
    whole[1] = 1
    part[2].copy_(part[1])
    assert [bool((block == 1).all()) for block in whole] == [False, True, True, *[False] * 3]


@pytest.mark.parametrize(
    "layers_of",
    [
        pytest.param(lambda whole: [whole[:, 1], whole[:, 0], whole[:, 2]], id="in another order"),
        pytest.param(lambda whole: [whole[:, 0], whole[:, 1], whole[:, 3]], id="with a gap"),
        pytest.param(lambda whole: [whole[:, each] for each in (0, 1, 2)], id="with a gap behind"),
        pytest.param(
            lambda whole: [whole[:, 0], whole[:, 1], whole[:, 2].clone()], id="one elsewhere"
        ),
    ],
)
def test_views_that_do_not_make_whole_blocks_stay_apart(
    layers_of: Callable[[torch.Tensor], list[torch.Tensor]],
):
    whole = torch.zeros((BLOCKS, LAYERS + 1, TOKENS, HEADS, 2 * SIZE), dtype=torch.bfloat16)
    views = layers_of(whole)
    caches = {f"layer {place}": view for place, view in enumerate(views)}
    parts = parts_of(SHAPE, caches)
    assert [part.data_ptr() for part in parts] == [view.data_ptr() for view in views]


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


class Backend:
    """vLLM's attention backend, as far as it is asked."""

    name = "FLASH_ATTN"
    sizes: tuple[Any, ...] = (SimpleNamespace(base=16),)

    @classmethod
    def get_name(cls) -> str:
        return cls.name

    @classmethod
    def get_attn_backend(cls) -> type[Backend]:
        return cls

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> tuple[Any, ...]:
        return cls.sizes


class SmallBlocks(Backend):
    sizes = (8, 16)


class Flattens(Backend):
    name = "FLEX_ATTENTION"


class Blocks(Backend):
    sizes = (16, TOKENS)


class Latents(Backend):
    name = "FLASH_ATTN_MLA"


def engine(device: str = "cuda", second: bool = True, backend: type[Backend] = Backend) -> Any:
    """vLLM's configuration, of 0.26."""
    layers_by_name = {f"layer {each}": backend for each in range(LAYERS)}
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        use_v2_model_runner=second,
        compilation_config=SimpleNamespace(static_forward_context=layers_by_name),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, world_size=1),
        model_config=None,
    )


def plan(size: int = BLOCKS * PAGE, stride: int | None = 0, **spec: Any) -> Any:
    """vLLM's `KVCacheConfig` of one group of layers; without `stride` that of another version."""
    told = {"page_size_bytes": PAGE, "block_size": TOKENS, "page_size_padded": None}
    told |= {"indexes_kv_by_block_stride": True, **spec}
    names = [f"layer {each}" for each in range(LAYERS)]
    packed = {} if stride is None else {"offset": 0, "block_stride": stride}
    return SimpleNamespace(
        num_blocks=BLOCKS,
        kv_cache_tensors=[SimpleNamespace(size=size, shared_by=[name], **packed) for name in names],
        kv_cache_groups=[SimpleNamespace(layer_names=names, kv_cache_spec=SimpleNamespace(**told))],
    )


def allocated(config: Any) -> dict[str, torch.Tensor]:
    """What 0.26's second model runner makes of a packed plan."""
    backing = torch.zeros(config.kv_cache_tensors[0].size, dtype=torch.uint8)
    return {
        each.shared_by[0]: backing.view(-1, each.block_stride)[:, each.offset : each.offset + PAGE]
        .view(torch.bfloat16)
        .view(BLOCKS, TOKENS, HEADS, 2 * SIZE)
        for each in config.kv_cache_tensors
    }


@pytest.mark.parametrize("backend", [Backend, Blocks, Latents])
def test_blocks_are_laid_side_by_side_before_they_are_allocated(backend: type[Backend]):
    config = plan()
    assert read_shape(engine(), config) == SHAPE
    assert lay_side_by_side(engine(backend=backend), config)
    assert {each.size for each in config.kv_cache_tensors} == {BLOCKS * LAYERS * PAGE}
    pool = device_pool(SHAPE, parts_of(SHAPE, allocated(config)))
    assert pool.fragments == ((0, LAYERS * PAGE, LAYERS * PAGE),)


@pytest.mark.parametrize(
    ("config", "vllm_config"),
    [
        pytest.param(plan(), engine(device="cpu"), id="on a CPU"),
        pytest.param(plan(), engine(second=False), id="the first model runner asks"),
        pytest.param(plan(), engine(backend=SmallBlocks), id="a kernel's blocks are smaller"),
        pytest.param(plan(), engine(backend=Flattens), id="a kernel flattens blocks"),
        pytest.param(plan(stride=PAGE), engine(), id="packed already"),
        pytest.param(plan(stride=None), engine(), id="another version"),
        pytest.param(plan(size=2 * BLOCKS * PAGE), engine(), id="sizes of something else"),
        pytest.param(plan(page_size_padded=2 * PAGE), engine(), id="padded pages"),
        pytest.param(plan(indexes_kv_by_block_stride=False), engine(), id="blocks are not outside"),
    ],
)
def test_a_plan_that_is_not_known_to_be_packed_is_left_alone(config: Any, vllm_config: Any):
    before = copy.deepcopy(config)
    assert not lay_side_by_side(vllm_config, config)
    assert config == before
