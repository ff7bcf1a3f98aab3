"""The proof, in a few tiny forward passes, that a decoder can be served in mixed batches.

A model is taken if plain causal attention through our seam, with two requests packed side by side,
gives the logits of the model's own code, and if a request far into the context leaves the others
alone. That finds masks, states between tokens and rotary frequencies that follow the longest
request, without knowing any family by name. Both are shown by one pass with all three; only where
it gives other logits do further ones find out why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from forebay.engine.attention import PAGED, causal_attention
from forebay.errors import ModelError

Shape = tuple[int, int]
"""``[heads, dim]`` of the K or V of one token in one layer."""

# Of two requests, and of a third that is far into the context.
_LENGTHS = (6, 5, 5)
_STRIDES = (7, 11, 11)
# Of the kinds of layers that a configuration may list: a window is refused by its argument, if it
# is shorter than the context; other kinds (chunks, linear attention) reach no argument.
_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})


def prove(
    model: PreTrainedModel, name: str, vocab_size: int, context_tokens: int
) -> tuple[tuple[tuple[Shape, Shape], ...], torch.dtype]:
    """Sets our attention on `model`, for good; returns per layer the shapes of K and V, and dtype.

    Raises ModelError with the reason if the model cannot be served.
    """
    config = model.config.get_text_config()
    if others := set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS:
        raise ModelError(f"{name} has layers of kinds that are not supported: {sorted(others)}")
    places = [torch.arange(length, device=model.device) for length in _LENGTHS]
    ids = [at * stride % vocab_size for at, stride in zip(places, _STRIDES, strict=True)]
    places[2] += max(0, context_tokens - _LENGTHS[2])
    with torch.inference_mode():
        own = _own_logits(model, name, ids[:2])
        model.set_attn_implementation(PAGED)
        probe = _Probe(context_tokens, _LENGTHS)
        packed = _packed_logits(model, name, ids, places, probe)
        _check_layers(probe, name, config.num_hidden_layers)
        if _differ(packed[: len(own)], own):
            two = _Probe(context_tokens, _LENGTHS[:2])
            near = _packed_logits(model, name, ids[:2], places[:2], two)
            raise ModelError(f"{name}: {_why(alone=not _differ(near, own))}")
    return tuple(probe.shapes[i] for i in range(config.num_hidden_layers)), probe.dtypes.pop()


def _why(*, alone: bool) -> str:
    """Why the logits differ; `alone`: only where a long request is beside."""
    if alone:
        return (
            "a long request changes the logits of a short one beside it (rotary frequencies that "
            "follow the longest one); that is not supported"
        )
    return (
        "plain causal attention, one request beside another, gives other logits than the model's "
        "own code; it uses a mask or a state that is not supported"
    )


@dataclass(slots=True)
class _Probe:
    """Attention of the packed requests without a pool, noting what each layer hands over."""

    context_tokens: int
    lengths: tuple[int, ...]
    shapes: dict[int, tuple[Shape, Shape]] = field(default_factory=dict[int, Any])
    dtypes: set[torch.dtype] = field(default_factory=set[torch.dtype])

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        if layer in self.shapes:
            raise ModelError(f"layer {layer} attends more than once")
        self.shapes[layer] = (key.shape[0], key.shape[2]), (value.shape[0], value.shape[2])
        self.dtypes |= {key.dtype, value.dtype}
        out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
        first = 0
        for length in self.lengths:
            rows = slice(first, first + length)
            causal_attention(query[:, rows], key[:, rows], value[:, rows], None, scale, out[rows])
            first += length
        return out


def _check_layers(probe: _Probe, name: str, layers: int) -> None:
    if sorted(probe.shapes) != list(range(layers)):
        raise ModelError(
            f"{name}: {len(probe.shapes)} of {layers} layers let their attention be replaced; "
            "layers with attention of their own, or without K/V, are not supported"
        )
    if len(probe.dtypes) != 1:
        raise ModelError(f"{name}: K and V of several types are not supported: {probe.dtypes}")


def _own_logits(model: PreTrainedModel, name: str, ids: Sequence[torch.Tensor]) -> torch.Tensor:
    """One behind the other. They are rows of one batch, a decoder's logits do not look ahead."""
    rows = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True)
    try:
        logits = model(input_ids=rows, use_cache=False).logits
    except Exception as error:
        raise ModelError(f"{name}: the model's own forward pass fails: {error!r}") from error
    return torch.cat([logits[i, : len(row)] for i, row in enumerate(ids)])


def _packed_logits(
    model: PreTrainedModel,
    name: str,
    ids: Sequence[torch.Tensor],
    places: Sequence[torch.Tensor],
    probe: _Probe,
) -> torch.Tensor:
    try:
        return model(
            input_ids=torch.cat(list(ids)).unsqueeze(0),
            position_ids=torch.cat(list(places)).unsqueeze(0),
            use_cache=False,
            attention_context=probe,
        ).logits[0]
    except (TypeError, ModelError) as error:
        raise ModelError(f"{name} is not supported: {error}") from error


def _differ(logits: torch.Tensor, own: torch.Tensor) -> bool:
    """Far beyond rounding: on average 1e-3 of the logits' spread in 32 bit, a tenth in 16 bit."""
    share = 1e-3 if own.dtype == torch.float32 else 0.1
    error = (logits.float() - own.float()).abs().mean()
    return not bool(error <= share * own.float().std())
