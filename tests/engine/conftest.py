"""Tiny random decoders of many families, and what plain `generate` says about them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import byte_tokens
import numpy as np
import pytest
import torch
import transformers
from tiny_models import VOCAB, build
from tokenizers import Tokenizer, decoders, models

from forebay.engine.attention import PAGED
from forebay.engine.models import LoadedModel, adopt_model, load_model


@cache
def _loaded(family: str) -> LoadedModel:
    return adopt_model(build(family), name=f"tiny {family}")


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], LoadedModel]:
    """`tiny_model(family)`: the loaded decoder of one of FAMILIES, made once."""
    return _loaded


@pytest.fixture(scope="session")
def build_model() -> Callable[..., transformers.PreTrainedModel]:
    """`build_model(family, **config)`: a random decoder of any family, not yet loaded."""
    return build


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    return load_model("smollm2", device="cpu")


@pytest.fixture(scope="session")
def plain_generate() -> Callable[[LoadedModel, Sequence[int], int], list[int]]:
    """`plain_generate(loaded, prompt, count)`: greedy tokens of `generate` over sdpa, no EOS."""
    return generate


def generate(loaded: LoadedModel, prompt: Sequence[int], count: int) -> list[int]:
    model: Any = loaded.model
    ends = model.generation_config.eos_token_id
    model.set_attn_implementation("sdpa")
    # `min_new_tokens` would change which tokens are chosen.
    model.generation_config.eos_token_id = None
    try:
        ids = torch.tensor([list(prompt)])
        mask = torch.ones_like(ids)
        result = model.generate(
            ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0
        )
        return result[0, len(prompt) :].tolist()
    finally:
        model.generation_config.eos_token_id = ends
        model.set_attn_implementation(PAGED)


@pytest.fixture
def random_prompts() -> Callable[..., list[np.ndarray]]:
    def prompts(lengths: Sequence[int], vocab: int = VOCAB, seed: int = 0) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        return [rng.integers(3, vocab, length, dtype=np.int64) for length in lengths]

    return prompts


@pytest.fixture(scope="session")
def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a byte, and an end token; fits the tiny models."""
    return byte_tokens.byte_tokenizer()


@pytest.fixture(scope="session")
def piece_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Word pieces with a mark for the space, and bytes for what has no piece, as Llama 2 has."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["\u2581", "\u2581hello", "\u2581world", "hello", "world", "!", "s"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Such small steps are quicker on one thread, and the link's threads get the other core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def llama(tiny_model: Callable[[str], LoadedModel]) -> LoadedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def talking(build_model: Any, byte_tokenizer: Any) -> LoadedModel:
    """A tiny decoder each of whose tokens is a byte of text."""
    return adopt_model(build_model("llama", vocab_size=259), byte_tokenizer, name="talking")
