"""The client: sends prompts to one engine, and notes when each token arrives."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sizes import Sizes
from weights import WEIGHTS_SEED

_RESETS = 400
_RESET_PAUSE_S = 0.025
_LEAST_TOKEN = 1000


@dataclass(slots=True)
class Reply:
    """One answer. Times are in seconds of `time.perf_counter`."""

    sent_s: float
    prompt_tokens: int
    cached_tokens: int = 0
    tokens: list[int] = field(default_factory=list[int])
    arrived_s: list[float] = field(default_factory=list[float])
    """When each output came; an output may bring several tokens."""

    @property
    def ttft_s(self) -> float:
        """From sending to the first token."""
        return self.arrived_s[0] - self.sent_s

    @property
    def ended_s(self) -> float:
        """When the last token came."""
        return self.arrived_s[-1]

    def sample(self) -> dict[str, Any]:
        """What is kept of it."""
        return {
            "ttft_ms": round(self.ttft_s * 1e3, 3),
            "total_ms": round((self.ended_s - self.sent_s) * 1e3, 3),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
        }


class Client:
    """Asks `engine`, an `AsyncLLM` with host memory or without. All prompts come from `dice`."""

    def __init__(self, engine: Any, sizes: Sizes, *, tier: bool) -> None:
        import vllm  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
        from vllm.sampling_params import (  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
            RequestOutputKind,
        )

        self.engine = engine
        self.sizes = sizes
        self.dice = random.Random(0)
        self._tier = tier
        self._sampling: Any = vllm.SamplingParams
        self._delta = RequestOutputKind.DELTA
        self._sent = 0

    def prompt(self, tokens: int) -> list[int]:
        """A new prompt."""
        vocabulary = self.sizes.model["vocab_size"]
        least = min(_LEAST_TOKEN, vocabulary // 10)
        return self.dice.choices(range(least, vocabulary - 1), k=tokens)

    async def ask(
        self, prompt: list[int], answer: int, forebay: Mapping[str, Any] | None = None
    ) -> Reply:
        """Send `prompt` and take all of an answer of `answer` tokens."""
        self._sent += 1
        extra = {"kv_transfer_params": {"forebay": dict(forebay)}} if forebay else None
        params = self._sampling(
            temperature=0.0,
            max_tokens=answer,
            ignore_eos=True,
            detokenize=False,
            output_kind=self._delta,
            extra_args=extra,
        )
        reply = Reply(time.perf_counter(), len(prompt))
        asked = {"prompt_token_ids": prompt}
        async for output in self.engine.generate(asked, params, f"q{self._sent}"):
            if output.outputs and output.outputs[0].token_ids:
                reply.arrived_s.append(time.perf_counter())
                reply.tokens += output.outputs[0].token_ids
            reply.cached_tokens = output.num_cached_tokens or reply.cached_tokens
        return reply

    async def distribution(
        self, prompt: list[int], *, fresh: bool
    ) -> tuple[NDArray[np.float32], int]:
        """The log probabilities of all tokens after `prompt`, and how many of its tokens were
        found. If `fresh`, none is looked for.
        """
        self._sent += 1
        vocabulary = self.sizes.model["vocab_size"]
        params = self._sampling(
            temperature=0.0,
            max_tokens=1,
            detokenize=False,
            logprobs=vocabulary,
            flat_logprobs=True,
            skip_reading_prefix_cache=fresh,
        )
        told = np.full(vocabulary, -np.inf, np.float32)
        found = 0
        asked = {"prompt_token_ids": prompt}
        async for output in self.engine.generate(asked, params, f"q{self._sent}"):
            flat = output.outputs[0].logprobs
            told[np.array(flat.token_ids)] = np.array(flat.logprobs, np.float32)
            found = output.num_cached_tokens or 0
        return told, found

    async def fill_weights(self, attention_gain: float) -> int:
        """Fill all weights anew, where there is a GPU; what was cached is of others then. Returns
        how many matrices were filled.
        """
        if not self.sizes.gpu:
            return 0
        filled = await self.engine.collective_rpc(
            "fill_with_random_weights",
            kwargs={
                "std": self.sizes.weights_std,
                "seed": WEIGHTS_SEED,
                "attention_gain": attention_gain,
            },
        )
        return int(filled[0])

    async def swap_loaded_blocks(self, on: bool) -> None:
        """See the worker's method of this name."""
        await self.engine.collective_rpc("swap_loaded_blocks", args=(on,))

    async def forget(self, *, host_too: bool = False) -> None:
        """Empty vLLM's prefix cache, once what was written behind is written."""
        await asyncio.sleep(0.4)
        for _ in range(_RESETS):
            if await self.engine.reset_prefix_cache(reset_connector=host_too and self._tier):
                return
            await asyncio.sleep(_RESET_PAUSE_S)
        raise TimeoutError("vLLM's prefix cache could not be emptied within 10 s")


def counters() -> dict[str, float]:
    """What vLLM and its connectors count, as `/metrics` would show it, without histograms' bins."""
    import prometheus_client  # noqa: PLC0415 - vLLM brings it

    found: dict[str, float] = {}
    for metric in prometheus_client.REGISTRY.collect():
        for sample in metric.samples:
            if not sample.name.startswith(("vllm:", "forebay")) or sample.name.endswith("_bucket"):
                continue
            labels = {
                name: value
                for name, value in sample.labels.items()
                if name not in ("engine", "model_name")
            }
            told = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
            name = f"{sample.name}{{{told}}}" if told else sample.name
            found[name] = found.get(name, 0.0) + sample.value
    return found


def changes(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What was counted between two looks."""
    return {
        name: value - before.get(name, 0.0)
        for name, value in after.items()
        if value != before.get(name, 0.0)
    }
