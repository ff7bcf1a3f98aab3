"""A program that serves with two engines of vLLM side by side (data parallelism), for a test.

    python vllm_side_by_side.py MODEL

Its last line is JSON: the tokens of all requests before and after the engines' caches were reset,
and how many tokens of each prompt were cached afterwards. Each request goes to one engine, the same
both times.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm_programs import connector, engine_options

PROMPTS = [[(7 * token + seed) % 300 + 5 for token in range(200)] for seed in range(6)]


def start(model: str) -> AsyncLLM:
    """Two engines."""
    options = engine_options(
        model,
        data_parallel_size=2,
        max_num_seqs=2,
        num_gpu_blocks_override=64,
        kv_transfer_config=KVTransferConfig(**connector()),
    )
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**options))


async def ask(engine: AsyncLLM, name: str, place: int) -> Any:
    """The whole answer to a prompt."""
    params = SamplingParams(
        temperature=0,
        max_tokens=10,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    prompt: Any = {"prompt_token_ids": PROMPTS[place]}
    outputs = engine.generate(prompt, params, f"{name}{place}", data_parallel_rank=place % 2)
    return [output async for output in outputs][-1]


async def main(model: str) -> dict[str, Any]:
    """Ask everything, reset, ask again."""
    engine = start(model)
    try:
        places = range(len(PROMPTS))
        before = await asyncio.gather(*(ask(engine, "a", place) for place in places))
        while not await engine.reset_prefix_cache():
            await asyncio.sleep(0.05)
        after = await asyncio.gather(*(ask(engine, "b", place) for place in places))
    finally:
        engine.shutdown()
    return {
        "before": [list(output.outputs[0].token_ids) for output in before],
        "after": [list(output.outputs[0].token_ids) for output in after],
        "cached": [output.num_cached_tokens for output in after],
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1]))))
