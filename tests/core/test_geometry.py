"""Bytes per token and block for the families of attention, and what a bad configuration says."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.errors import ModelError, SettingsError
from forebay.geometry import (
    Geometry,
    LayerKV,
    default_block_tokens,
    geometry_from_config,
    geometry_from_kv,
)

LLAMA_70B = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
}
LLAMA_8B = LLAMA_70B | {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
SMOLLM2 = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
}
GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768}
OPT = {"num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "head_dim": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


def test_llama_70b_figures() -> None:
    geometry = geometry_from_config(LLAMA_70B, element_bytes=2)
    assert geometry.token_bytes == 327_680
    assert 2048 * geometry.token_bytes == 671_088_640
    assert geometry.transfer_s(2048, 26e9) == pytest.approx(25.8e-3, abs=0.05e-3)
    assert (geometry.block_tokens, geometry.block_bytes) == (16, 5 << 20)


@pytest.mark.parametrize(
    ("config", "element_bytes", "block_tokens", "block_bytes"),
    [
        (LLAMA_8B, 2, 16, 2 << 20),
        (LLAMA_8B, 1, 32, 2 << 20),
        (SMOLLM2, 2, 32, 32 * 23_040),
        (SMOLLM2, 4, 32, 32 * 46_080),
    ],
)
def test_default_block_size(
    config: dict[str, Any], element_bytes: int, block_tokens: int, block_bytes: int
) -> None:
    geometry = geometry_from_config(config, element_bytes=element_bytes)
    assert (geometry.block_tokens, geometry.block_bytes) == (block_tokens, block_bytes)


def test_default_block_size_at_its_edge() -> None:
    assert default_block_tokens((2 << 20) // 16) == 16
    assert default_block_tokens((2 << 20) // 16 - 1) == 32


@pytest.mark.parametrize(
    ("config", "layer", "layers"),
    [
        (GPT2, LayerKV(12, 64, 12, 64), 12),
        (OPT, LayerKV(12, 64, 12, 64), 12),
        (OPT | {"num_key_value_heads": None, "head_dim": None}, LayerKV(12, 64, 12, 64), 12),
        (SMOLLM2 | {"head_dim": 128}, LayerKV(3, 128, 3, 128), 30),
        (GPT2 | {"multi_query": True}, LayerKV(1, 64, 1, 64), 12),
        (
            LLAMA_8B | {"num_kv_heads": 8, "multi_query": True, "new_decoder_architecture": True},
            LayerKV(8, 128, 8, 128),
            32,
        ),
        (DEEPSEEK_V3, LayerKV(128, 192, 128, 128), 61),
        (
            {"model_type": "llava", "hidden_size": 1, "text_config": SMOLLM2},
            LayerKV(3, 64, 3, 64),
            30,
        ),
    ],
)
def test_families(config: dict[str, Any], layer: LayerKV, layers: int) -> None:
    assert geometry_from_config(config, element_bytes=2).layers == (layer,) * layers


def test_latent_of_mla() -> None:
    geometry = geometry_from_config(DEEPSEEK_V3, element_bytes=2, mla="latent")
    assert geometry.token_bytes == 61 * 576 * 2


def test_seen_shapes_are_the_truth() -> None:
    geometry = geometry_from_kv(
        [((128, 192), (128, 128)), ((2, 8), (1, 4))], element_bytes=2, block_tokens=4
    )
    assert geometry.layers == (LayerKV(128, 192, 128, 128), LayerKV(2, 8, 1, 4))
    assert geometry.fragment_bytes == ((196_608, 131_072), (128, 32))
    assert geometry.layer_offsets == ((0, 196_608), (327_680, 327_808))
    assert geometry.block_bytes == 327_840
    expected = geometry_from_config(DEEPSEEK_V3, element_bytes=2)
    assert geometry_from_kv([((128, 192), (128, 128))] * 61, element_bytes=2) == expected


@pytest.mark.parametrize("missing", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_missing_key_is_named(missing: str) -> None:
    config = {name: value for name, value in SMOLLM2.items() if name != missing}
    with pytest.raises(ModelError, match=missing):
        geometry_from_config(config, element_bytes=2)
    with pytest.raises(ModelError, match=missing):
        geometry_from_config({"text_config": config}, element_bytes=2)


@pytest.mark.parametrize("missing", ["qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"])
def test_missing_mla_key_is_named(missing: str) -> None:
    config = {name: value for name, value in DEEPSEEK_V3.items() if name != missing}
    with pytest.raises(ModelError, match=missing):
        geometry_from_config(config, element_bytes=2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_hidden_layers": "30"}, "num_hidden_layers='30'"),
        ({"num_attention_heads": True}, "num_attention_heads=True"),
        ({"num_key_value_heads": 2}, "does not divide"),
        ({"hidden_size": 577}, "head_dim is missing"),
        ({"head_dim": -1}, "head_dim=-1"),
        ({"text_config": 3}, "text_config"),
        ({"is_encoder_decoder": True}, "decoder-only"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    ],
)
def test_malformed_config(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        geometry_from_config(SMOLLM2 | change, element_bytes=2)


def test_attention_layer_types_are_accepted() -> None:
    kinds = ["sliding_attention", "full_attention"]
    assert geometry_from_config(SMOLLM2 | {"layer_types": kinds}, element_bytes=2).layers


@pytest.mark.parametrize("shape", [(), (3,), (3, 64, 1), (0, 64), (3, 0)])
def test_malformed_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError):
        geometry_from_kv([(shape, (3, 64))], element_bytes=2)
    with pytest.raises(ModelError):
        geometry_from_kv([((3, 64), shape)], element_bytes=2)


def test_model_without_layers() -> None:
    with pytest.raises(ModelError, match="no layer"):
        geometry_from_kv([], element_bytes=2)


def test_malformed_settings() -> None:
    layers = (LayerKV(3, 64, 3, 64),)
    with pytest.raises(SettingsError, match="element_bytes"):
        Geometry(layers, 0, 16)
    with pytest.raises(SettingsError, match="block_tokens"):
        geometry_from_config(SMOLLM2, element_bytes=2, block_tokens=0)
    with pytest.raises(SettingsError, match="bytes_per_s"):
        Geometry(layers, 2, 16).transfer_s(1, 0)
