"""Attention over paged KV, plugged into unmodified Hugging Face decoders.

The one idea: a decoder's attention layer hands its queries, keys and values to a function found by
name. Ours writes K and V into the pool, gathers what each request needs, and runs torch's own
scaled dot product attention on it. A layer's extra arguments are its demands: what is set and not
known here is refused with :class:`ModelError`, whatever the model is called.

Slots may hold anything where nothing was written, NaN too. A masked score gives weight 0, and
0 x NaN is NaN, so everything gathered beyond a request's length is zeroed before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from forebay.engine.pool import KVPool
from forebay.errors import ModelError

PAGED = "forebay_paged"
"""The name of the attention in Hugging Face's registry."""

_HARMLESS = frozenset({"position_ids", "use_cache", "dropout", "output_router_logits", "is_causal"})


class AttentionContext(Protocol):
    """What one forward pass attends to: the argument ``attention_context`` of the model."""

    context_tokens: int

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Takes packed q ``[H, T, D]``, k ``[Hkv, T, D]``, v ``[Hkv, T, Dv]`` -> ``[T, H, Dv]``."""
        ...


def forebay_paged(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    attention_context: AttentionContext | None = None,
    **demands: Any,
) -> tuple[torch.Tensor, None]:
    """The function registered as :data:`PAGED`: batch 1, requests packed along T.

    Returns ``[1, T, H, Dv]`` and no weights. Raises ModelError on a demand that is not met.
    """
    if attention_context is None:
        raise ModelError(
            "this model does not pass extra arguments of its forward on to its attention layers"
        )
    refuse_unmet(module, attention_mask, demands, attention_context.context_tokens)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ModelError(f"{type(module).__name__} has no layer_idx: its K/V cannot be told apart")
    out = attention_context.attend(layer, query[0], key[0], value[0], scale)
    return out.unsqueeze(0), None


def refuse_unmet(
    module: torch.nn.Module,
    attention_mask: torch.Tensor | None,
    demands: Mapping[str, Any],
    context_tokens: int,
) -> None:
    """Raises ModelError if an attention layer asks for anything but plain causal attention."""
    unmet = [
        n for n, v in demands.items() if n not in _HARMLESS and v is not None and v is not False
    ]
    window = demands.get("sliding_window")
    if isinstance(window, int) and window >= context_tokens:
        unmet.remove("sliding_window")
    if attention_mask is not None:
        unmet.append("attention_mask")
    if demands.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        unmet.append("attention that is not causal")
    if demands.get("dropout"):
        unmet.append("dropout")
    if unmet:
        wanted = ", ".join(f"{n}={demands[n]}" if _short(demands.get(n)) else n for n in unmet)
        raise ModelError(
            f"attention layers of {type(module).__name__} need what is not supported: {wanted}"
        )


def _short(value: Any) -> bool:
    return isinstance(value, int | float | str)


AttentionInterface.register(PAGED, forebay_paged)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """One-token chunks of similar length, neighbours in the packed batch, attended together."""

    first: int
    count: int
    longest: int
    blocks: torch.Tensor
    """Slots, ``[count * blocks per row]``; short rows are padded with a slot of their own."""
    beyond: torch.Tensor
    """Flat token places of ``[count * blocks per row * block_tokens]`` past each row's length."""
    mask: torch.Tensor | None
    """``[count, 1, 1, longest]``, True where a row has a token; None if all are equally long."""


@dataclass(frozen=True, slots=True)
class Span:
    """A chunk of several tokens of one request at ``first..first+count`` in the packed batch."""

    first: int
    count: int
    length: int
    blocks: torch.Tensor | None
    """Slots that cover ``length`` tokens; None where the chunk is the whole context."""
    mask: torch.Tensor | None
    """``[count, length]``, True where a token may look; None where the chunk is the context."""


LayerGate = Callable[[int], None]
"""Called with each layer before it reads KV; may wait until that is there, or raise."""


@dataclass(slots=True)
class PagedContext:
    """One step over a pool. Indices are made once per step and shared by all layers.

    ``attend`` writes each layer's new K and V into the pool before it reads.
    """

    pool: KVPool
    context_tokens: int
    write_slots: torch.Tensor
    write_places: torch.Tensor
    groups: list[DecodeGroup]
    spans: list[Span]
    scratch: Scratch = field(repr=False)
    gate: LayerGate | None = None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        if self.gate is not None:
            self.gate(layer)
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        where = (self.write_slots, self.write_places)
        keys.index_put_(where, key.transpose(0, 1))
        values.index_put_(where, value.transpose(0, 1))
        out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
        for group in self.groups:
            self._decode(group, query, keys, values, scale, out)
        for span in self.spans:
            rows = slice(span.first, span.first + span.count)
            if span.blocks is None:
                k, v = key[:, rows], value[:, rows]
            else:
                k = self.scratch.gather(0, keys, span.blocks)[: span.length].transpose(0, 1)
                v = self.scratch.gather(1, values, span.blocks)[: span.length].transpose(0, 1)
            causal_attention(query[:, rows], k, v, span.mask, scale, out[rows])
        return out

    def _decode(
        self,
        group: DecodeGroup,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        k, v = (
            self.scratch.gather(0, keys, group.blocks),
            self.scratch.gather(1, values, group.blocks),
        )
        k.index_fill_(0, group.beyond, 0.0)
        v.index_fill_(0, group.beyond, 0.0)
        rows = slice(group.first, group.first + group.count)
        kv_heads = keys.shape[2]
        # One query token: the query heads that share a K/V head stand in as its "tokens".
        q = query[:, rows].transpose(0, 1).reshape(group.count, kv_heads, -1, query.shape[2])
        k = k.view(group.count, -1, *k.shape[1:])[:, : group.longest].transpose(1, 2)
        v = v.view(group.count, -1, *v.shape[1:])[:, : group.longest].transpose(1, 2)
        result = scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scale)
        out[rows] = result.reshape(group.count, -1, v.shape[3])


class Scratch:
    """Room for what is gathered, one piece for K and one for V, grown and then kept.

    Each gather overwrites the last one of its piece. Saves a fresh allocation per layer, which on
    CPU costs more than the copy itself.
    """

    def __init__(self) -> None:
        self._pieces: list[torch.Tensor | None] = [None, None]

    def gather(self, piece: int, view: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Rows of `view` ``[slots, tokens, heads, dim]`` -> ``[blocks * tokens, heads, dim]``."""
        shape = (len(blocks), *view.shape[1:])
        size = shape[0] * shape[1] * shape[2] * shape[3]
        room = self._pieces[piece]
        if room is None or room.numel() < size:
            room = self._pieces[piece] = view.new_empty(size + size // 2)
        out = room[:size].view(shape)
        torch.index_select(view, 0, blocks, out=out)
        return out.view(-1, *shape[2:])


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
) -> None:
    """q ``[H, n, D]`` over k, v ``[Hkv, L, ...]`` into `out` ``[n, H, Dv]``; no mask: n == L."""
    result = scaled_dot_product_attention(
        query.unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[0] != key.shape[0],
    )
    out.copy_(result[0].transpose(0, 1))
