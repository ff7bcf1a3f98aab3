"""Bytes: what a block is for a model, and how many tokens to put in one.

A block holds, for each layer in turn, the keys and then the values of its tokens, in the order
``[layer, K/V, token, head, dim]``. All that the rest of Forebay knows of a model is this shape.

What is stored is what the attention of a model is handed: keys after rotary embedding and norms,
not repeated over query groups. A model with latent attention (MLA) hands over *expanded* keys and
values, one pair per attention head, unless its engine keeps the latent itself. A configuration can
only predict that; the shapes first seen (:func:`geometry_from_kv`) are the truth and replace it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, cast

from forebay.errors import ModelError, SettingsError

MIN_EFFICIENT_BLOCK_BYTES = 2 << 20
"""A copy of this size or more loses little to its fixed cost on a PCIe link."""

SMALL_BLOCK_TOKENS = 16
LARGE_BLOCK_TOKENS = 32

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The K and V of one token in one layer, counted in elements.

    ``value_heads`` and ``value_dim`` are both 0 where one latent vector serves as K and V.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int

    def __post_init__(self) -> None:
        if self.key_heads < 1 or self.key_dim < 1:
            raise ModelError(f"{self}: a layer needs at least one key head of at least one element")
        if min(self.value_heads, self.value_dim) < 0 or (
            (self.value_heads == 0) != (self.value_dim == 0)
        ):
            raise ModelError(f"{self}: value heads and value dim must both be positive or both 0")

    @property
    def key_elements(self) -> int:
        """Elements of K per token."""
        return self.key_heads * self.key_dim

    @property
    def value_elements(self) -> int:
        """Elements of V per token."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of a block. Immutable; all sizes in bytes.

    Raises :class:`SettingsError` for sizes that are not positive, :class:`ModelError` for a model
    without layers.
    """

    layers: tuple[LayerKV, ...]
    element_bytes: int
    block_tokens: int
    token_bytes: int = field(init=False, repr=False, compare=False)
    block_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.element_bytes < 1:
            raise SettingsError(
                f"element_bytes={self.element_bytes}: an element has 1 byte or more"
            )
        if self.block_tokens < 1:
            raise SettingsError(f"block_tokens={self.block_tokens}: a block needs at least a token")
        if not self.layers:
            raise ModelError("no layer has keys and values: nothing to keep for this model")
        token_bytes = _token_bytes(self.layers, self.element_bytes)
        object.__setattr__(self, "token_bytes", token_bytes)
        object.__setattr__(self, "block_bytes", token_bytes * self.block_tokens)

    @property
    def fragment_bytes(self) -> tuple[tuple[int, int], ...]:
        """(K bytes, V bytes) of each layer within a block."""
        scale = self.element_bytes * self.block_tokens
        return tuple((kv.key_elements * scale, kv.value_elements * scale) for kv in self.layers)

    @property
    def layer_offsets(self) -> tuple[tuple[int, int], ...]:
        """(offset of K, offset of V) of each layer within a block."""
        sizes = self.fragment_bytes
        ends = accumulate((keys + values for keys, values in sizes), initial=0)
        return tuple((at, at + keys) for at, (keys, _) in zip(ends, sizes, strict=False))

    @property
    def layer_ends(self) -> tuple[int, ...]:
        """The byte of a block at which each layer ends."""
        return tuple(accumulate(keys + values for keys, values in self.fragment_bytes))

    def transfer_s(self, tokens: int, bytes_per_s: float) -> float:
        """Seconds that the KV of ``tokens`` tokens takes over a link of that rate."""
        if bytes_per_s <= 0:
            raise SettingsError(f"bytes_per_s={bytes_per_s}: a link's rate must be positive")
        return tokens * self.token_bytes / bytes_per_s


def default_block_tokens(token_bytes: int) -> int:
    """The smaller of 16 and 32 tokens whose block has at least 2 MiB, else 32."""
    if SMALL_BLOCK_TOKENS * token_bytes >= MIN_EFFICIENT_BLOCK_BYTES:
        return SMALL_BLOCK_TOKENS
    return LARGE_BLOCK_TOKENS


def default_window_bytes(block_bytes: int) -> int:
    """Two blocks, so that most windows have more than one; at least 256 KiB, at most 8 MiB."""
    return min(8 << 20, max(256 << 10, 2 * block_bytes))


def geometry_from_config(
    config: Mapping[str, object],
    *,
    element_bytes: int,
    block_tokens: int | None = None,
    mla: Literal["expanded", "latent"] = "expanded",
) -> Geometry:
    """Predicts the geometry from a Hugging Face configuration (the parsed ``config.json``).

    Understands grouped-query, multi-query, multi-head and latent attention, and reads the decoder
    of a multimodal model from its ``text_config``. For latent attention ``expanded`` is what
    Hugging Face modules hand to their attention function, per head a key of ``qk_nope_head_dim +
    qk_rope_head_dim`` and a value of ``v_head_dim``; ``latent`` is what engines with absorbed
    projections keep, one vector of ``kv_lora_rank + qk_rope_head_dim`` per token.

    Raises :class:`ModelError` naming the key that is missing or malformed, and for models whose
    layers are not all attention.
    """
    decoder = _decoder(config)
    kinds = cast("Sequence[str]", decoder.get("layer_types") or ())
    if others := sorted(set(kinds) - _ATTENTION_LAYERS):
        raise ModelError(f"layer_types: {others} keep no K/V per token and are not supported")
    layer = _mla_layer(decoder, mla) if _given(decoder, ("kv_lora_rank",)) else _layer(decoder)
    return _geometry((layer,) * _number(decoder, _LAYERS), element_bytes, block_tokens)


def geometry_from_kv(
    shapes: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    element_bytes: int,
    block_tokens: int | None = None,
) -> Geometry:
    """The geometry of the K and V first seen: a pair of ``[heads, dim]`` for each layer in order.

    Raises :class:`ModelError` for a shape that is not two positive numbers.
    """
    layers: list[LayerKV] = []
    for index, pair in enumerate(shapes):
        if any(len(shape) != 2 for shape in pair):
            raise ModelError(f"layer {index}: K and V must each be [heads, dim], not {pair}")
        (key_heads, key_dim), (value_heads, value_dim) = pair
        layers.append(LayerKV(key_heads, key_dim, value_heads, value_dim))
    return _geometry(tuple(layers), element_bytes, block_tokens)


def _geometry(
    layers: tuple[LayerKV, ...], element_bytes: int, block_tokens: int | None
) -> Geometry:
    if block_tokens is None:
        block_tokens = default_block_tokens(_token_bytes(layers, element_bytes))
    return Geometry(layers, element_bytes, block_tokens)


def _token_bytes(layers: tuple[LayerKV, ...], element_bytes: int) -> int:
    return element_bytes * sum(kv.key_elements + kv.value_elements for kv in layers)


def _decoder(config: Mapping[str, object]) -> Mapping[str, object]:
    if config.get("is_encoder_decoder"):
        raise ModelError("is_encoder_decoder is set: only decoder-only models are supported")
    nested = config.get("text_config")
    if nested is None:
        return config
    if not isinstance(nested, Mapping):
        raise ModelError("text_config: expected an object with the decoder's configuration")
    return cast("Mapping[str, object]", nested)


def _layer(decoder: Mapping[str, object]) -> LayerKV:
    heads = _number(decoder, _HEADS)
    kv_heads = _number(decoder, _KEY_VALUE_HEADS) if _given(decoder, _KEY_VALUE_HEADS) else heads
    # Falcon 7B and GPT-BigCode state one shared head as a flag, beside a head count that is not it.
    if decoder.get("multi_query") and not decoder.get("new_decoder_architecture"):
        kv_heads = 1
    if heads % kv_heads:
        raise ModelError(f"num_key_value_heads={kv_heads} does not divide {heads} attention heads")
    if _given(decoder, ("head_dim",)):
        dim = _number(decoder, ("head_dim",))
    else:
        width = _number(decoder, _WIDTH)
        if width % heads:
            raise ModelError(
                f"head_dim is missing and hidden_size={width} is no multiple of {heads} heads"
            )
        dim = width // heads
    return LayerKV(kv_heads, dim, kv_heads, dim)


def _mla_layer(decoder: Mapping[str, object], mla: Literal["expanded", "latent"]) -> LayerKV:
    rope = _number(decoder, ("qk_rope_head_dim",))
    if mla == "latent":
        return LayerKV(1, _number(decoder, ("kv_lora_rank",)) + rope, 0, 0)
    heads = _number(decoder, _HEADS)
    key_dim = _number(decoder, ("qk_nope_head_dim",)) + rope
    return LayerKV(heads, key_dim, heads, _number(decoder, ("v_head_dim",)))


def _given(decoder: Mapping[str, object], names: tuple[str, ...]) -> bool:
    return any(decoder.get(name) is not None for name in names)


def _number(decoder: Mapping[str, object], names: tuple[str, ...]) -> int:
    """The first of these keys that is given: families name the same thing differently."""
    for name in names:
        value = decoder.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{name}={value!r}: expected a positive whole number")
        return value
    first, *others = names
    also = f" (or {', '.join(others)})" if others else ""
    raise ModelError(f"the configuration has no {first}{also}")
