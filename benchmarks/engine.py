"""Decoding eight requests together, against a loop of Hugging Face `generate` over the same eight.

Only decode counts: from each request's first new token to its last, prompts already computed. Both
sides run the same model in the same process in turns, and must choose the same tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

# First, because it sets how OpenMP threads wait.
from forebay.engine.folder import SMOLLM2  # isort: skip
from forebay.engine.models import LoadedModel, load_model  # isort: skip

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.generation.streamers import BaseStreamer

from forebay.engine.attention import PAGED
from forebay.engine.pool import KVPool
from forebay.engine.runner import Chunk, Runner, probe_geometry
from forebay.engine.sampler import Sampler, SamplingParams, sample
from forebay.measure import report

GOALS = {"engine_vs_generate_b8": report.Goal(at_least=2.5)}
REQUESTS = 8


class _FirstToken(BaseStreamer):
    """Notes the CPU time at which `generate` has chosen its first new token."""

    def __init__(self) -> None:
        self.puts = 0
        self.at_s = 0.0

    def put(self, value: Any) -> None:
        self.puts += 1
        if self.puts == 2:
            self.at_s = time.process_time()

    def end(self) -> None:
        """Nothing is left to note."""


def generate_loop(
    loaded: LoadedModel, prompts: list[NDArray[np.int64]], new_tokens: int
) -> tuple[float, list[list[int]]]:
    """Decode seconds of CPU and the new tokens of each prompt, one `generate` after another."""
    model: Any = loaded.model
    model.set_attn_implementation("sdpa")
    spent, tokens = 0.0, []
    for prompt in prompts:
        ids = torch.from_numpy(prompt)[None]
        first = _FirstToken()
        result = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            streamer=first,
        )
        spent += time.process_time() - first.at_s
        tokens.append(result[0, len(prompt) :].tolist())
    model.set_attn_implementation(PAGED)
    return spent, tokens


def run_together(
    runner: Runner, prompts: list[NDArray[np.int64]], new_tokens: int
) -> tuple[float, list[list[int]]]:
    """Decode seconds of CPU and the new tokens of each prompt, all in one batch."""
    per_request = runner.pool.slots // len(prompts)
    slots = np.random.default_rng(1).permutation(runner.pool.slots).astype(np.int32)
    tables = slots[: per_request * len(prompts)].reshape(len(prompts), per_request)
    samplers = [Sampler(SamplingParams(), prompt) for prompt in prompts]
    chunks = [Chunk(prompt, 0, table) for prompt, table in zip(prompts, tables, strict=True)]
    drawn = [[token.token_id] for token in sample(samplers, runner.forward(chunks))]
    started = time.process_time()
    for _ in range(new_tokens - 1):
        chunks = [
            Chunk(np.array(tokens[-1:], dtype=np.int64), len(prompt) + len(tokens) - 1, table)
            for tokens, prompt, table in zip(drawn, prompts, tables, strict=True)
        ]
        for tokens, token in zip(drawn, sample(samplers, runner.forward(chunks)), strict=True):
            tokens.append(token.token_id)
    return time.process_time() - started, drawn


def arguments() -> argparse.Namespace:
    extra = argparse.ArgumentParser(add_help=False)
    extra.add_argument("--prompt-tokens", type=int, default=64)
    extra.add_argument("--new-tokens", type=int, default=16)
    extra.add_argument("--rounds", type=int, default=5)
    extra.add_argument("--threads", type=int, default=1, help="1: CPU time is the time taken")
    return report.arguments(__doc__ or "", extra).parse_args()


def measure(loaded: LoadedModel, options: argparse.Namespace) -> report.Figure:
    """Both sides in turns, `options.rounds` times over new prompts; the median of the ratios."""
    geometry = probe_geometry(loaded)
    per_request = -(-(options.prompt_tokens + options.new_tokens) // geometry.block_tokens) + 1
    runner = Runner(loaded, KVPool(geometry, REQUESTS * per_request))
    rng = np.random.default_rng(0)
    ratios: list[float] = []
    step_ms: list[float] = []
    same = 0
    for _ in range(options.rounds):
        lengths = options.prompt_tokens + rng.integers(-8, 8, REQUESTS)
        prompts = [rng.integers(20, loaded.vocab_size, int(n), dtype=np.int64) for n in lengths]
        ours_s, ours = run_together(runner, prompts, options.new_tokens)
        theirs_s, theirs = generate_loop(loaded, prompts, options.new_tokens)
        ratios.append(theirs_s / ours_s)
        step_ms.append(ours_s / (options.new_tokens - 1) * 1e3)
        same += sum(a == b for a, b in zip(ours, theirs, strict=True))
    settings = {
        "model": "SmolLM2-135M-Instruct float32",
        "requests": REQUESTS,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "threads": options.threads,
        "clock": "process CPU time, decode only",
        "step_ms_median": statistics.median(step_ms),
        "requests_with_equal_tokens": f"{same} of {REQUESTS * options.rounds}",
    }
    return report.median_figure("engine_vs_generate_b8", ratios, "ratio", settings)


def main() -> int:
    options = arguments()
    torch.set_num_threads(options.threads)
    loaded = load_model(SMOLLM2, device="cpu")
    generation: Any = loaded.model.generation_config
    generation.eos_token_id = None
    return report.finish(
        [measure(loaded, options)], GOALS, json=options.json, strict=options.strict
    )


if __name__ == "__main__":
    sys.exit(main())
