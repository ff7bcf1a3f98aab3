"""How far what an engine computed in 16 bit is from the model's own forward pass."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from oracle import Recorder, plain_logits

from forebay.engine.models import LoadedModel
from forebay.engine.pool import KVPool
from forebay.engine.request import EngineRequest
from forebay.engine.runner import Chunk, Runner, probe_geometry


def mean_divergence(
    loaded: LoadedModel, recorder: Recorder, requests: Iterable[EngineRequest]
) -> float:
    """Mean KL divergence of the engine's next-token distributions from the model's own behind the
    same tokens, over every token that the engine drew."""
    computed = {}
    for step, logits in zip(recorder.steps, recorder.logits, strict=True):
        for row, (request, start, tokens) in enumerate(
            zip(step.request_ids, step.starts, step.token_ids, strict=True)
        ):
            computed[request, start + len(tokens) - 1] = logits[row]
    found: list[float] = []
    for request in requests:
        own = plain_logits(loaded, request.tokens)
        first = len(request.prompt_ids) - 1
        for place in range(first, first + len(request.drawn)):
            found.append(_divergence(own[place], computed[request.id, place]))
    return float(np.mean(found))


def divergence_of_a_swapped_block(loaded: LoadedModel, block_tokens: int, seed: int = 0) -> float:
    """The same of a prompt that reads one block of another prompt: what must be noticed.

    Both stand at the same positions: two blocks of one prompt may be swapped and nothing changes,
    for a key carries its position.
    """
    blocks = 6
    pool = KVPool(
        probe_geometry(loaded, block_tokens),
        2 * blocks,
        dtype=loaded.kv_dtype,
        device=loaded.model.device,
    )
    rng = np.random.default_rng(seed)
    tokens, others = rng.integers(3, loaded.vocab_size, (2, blocks * block_tokens))
    half = blocks // 2 * block_tokens
    slots = np.arange(blocks, dtype=np.int32)
    runner = Runner(loaded, pool)
    runner.forward([Chunk(tokens[:half], 0, slots), Chunk(others[:half], 0, slots + blocks)])
    swapped = slots.copy()
    swapped[1] += blocks
    rest = runner.forward_all([Chunk(tokens[half:], half, swapped)])[0]
    own = plain_logits(loaded, tokens)[half:]
    return float(np.mean([_divergence(a, b) for a, b in zip(own, rest, strict=True)]))


def _divergence(own: torch.Tensor, other: torch.Tensor) -> float:
    own, other = (row.float().log_softmax(-1) for row in (own, other))
    return float((own.exp() * (own - other)).sum())
