"""What a prompt may be, and how long: checked before a request is queued."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from forebay.engine.models import LoadedModel
from forebay.engine.sampler import SamplingParams
from forebay.engine.text import encode
from forebay.errors import RequestError

Prompt = str | Sequence[int] | NDArray[np.int64]
"""Text, or one row of token ids."""


def several(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """`prompts`, of a text alone a list of that one. Raises RequestError for one row of tokens."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence | np.ndarray):
        raise RequestError(f"prompts come in a list, not as {type(prompts).__name__}")
    if any(isinstance(prompt, int | np.integer) for prompt in prompts):
        raise RequestError("one prompt of token ids is a list in a list, like [[1, 2, 3]]")
    return prompts


def prompt_tokens(loaded: LoadedModel, prompt: Prompt) -> NDArray[np.int64]:
    """The tokens of `prompt`, int64. Raises RequestError for what has none, or is no token."""
    if isinstance(prompt, str):
        if loaded.tokenizer is None:
            raise RequestError(f"{loaded.name} has no tokenizer: give token ids")
        prompt = encode(loaded.tokenizer, prompt)
    try:
        ids = np.asarray(prompt)
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError("a prompt is a text or one row of token ids") from error
    if ids.ndim != 1 or not len(ids):
        raise RequestError("a prompt needs at least one token, and all of them in one row")
    if ids.dtype.kind not in "iu":
        raise RequestError(f"token ids must be whole numbers of 64 bits, not {ids.dtype}")
    if int(ids.min()) < 0 or int(ids.max()) >= loaded.vocab_size:
        raise RequestError(f"token ids must be in 0..{loaded.vocab_size - 1}")
    return ids.astype(np.int64)


def check_params(loaded: LoadedModel, params: SamplingParams) -> SamplingParams:
    """`params`. Raises RequestError for another type, a bias of a token that the model lacks, or
    a least length that no token of the model can bring.
    """
    if not isinstance(params, SamplingParams):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RequestError(
            "sampling is given as SamplingParams, like SamplingParams(max_tokens=16), not as "
            f"{type(params).__name__}"
        )
    for token_id in params.logit_bias:
        if not 0 <= token_id < loaded.vocab_size:
            raise RequestError(
                f"logit_bias names token {token_id}; the model's are 0..{loaded.vocab_size - 1}"
            )
    if params.min_tokens:
        ending = params.stop_token_ids | (
            frozenset() if params.ignore_eos else loaded.eos_token_ids
        )
        if sum(0 <= token_id < loaded.vocab_size for token_id in ending) == loaded.vocab_size:
            raise RequestError("min_tokens cannot be reached: stop_token_ids are all there are")
    return params


def check_length(loaded: LoadedModel, prompt_tokens: int, params: SamplingParams) -> None:
    """Raises RequestError if prompt and answer do not fit the model's context together."""
    room = loaded.context_tokens - prompt_tokens
    if params.max_tokens > room:
        raise RequestError(
            f"a prompt of {prompt_tokens} tokens leaves room for {max(0, room)} tokens in "
            f"the model's context of {loaded.context_tokens}, and max_tokens is "
            f"{params.max_tokens}; shorten one of them"
        )
