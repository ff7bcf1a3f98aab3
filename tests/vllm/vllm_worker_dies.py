"""A program in which a worker of vLLM's is killed while it serves, for a test.

    python vllm_worker_dies.py MODEL

Its last line is JSON: how the engine ended, which files of /dev/shm it left (but for those by which
vLLM's own processes talk, which it leaves without us too, and those of other sessions), and the
tokens of an engine started after it in the same process.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm_programs import connector, engine_options

PROMPTS = [[(11 * token + seed) % 300 + 5 for token in range(300)] for seed in range(6)]

VLLMS_OWN = ("psm_", "vllm_dist_")


def start(model: str, workers: int) -> LLM:
    """An engine in this process over so many workers."""
    options = engine_options(
        model,
        tensor_parallel_size=workers,
        max_num_seqs=2,
        num_gpu_blocks_override=40,
        # Slow, so that copies are under way.
        kv_transfer_config=connector(copy_bytes_per_s=1e6),
    )
    return LLM(**options)


def serve(llm: LLM, answer: int) -> list[list[int]]:
    """The tokens of all answers."""
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
    asked: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(asked, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def left_by_us(name: str) -> bool:
    """Whether this file of /dev/shm is there, and no process of another session has mapped it."""
    file = Path("/dev/shm") / name
    if not file.exists():
        return False
    # By its number: a semaphore got its name after it was mapped.
    inode = str(file.stat().st_ino)
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if os.getsid(int(maps.parent.name)) == os.getsid(0):
                continue
            if any(inode in line.split()[4:5] for line in maps.read_text().splitlines()):
                return False
        except OSError:
            continue  # it has ended, or is not ours to look at
    return True


def main(model: str) -> dict[str, Any]:
    """Kill a worker, end its engine, start another."""
    executor: Any = importlib.import_module("vllm.v1.executor.multiproc_executor")
    executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    shared = set(os.listdir("/dev/shm"))
    llm = start(model, 2)
    before = serve(llm, 4)
    core: Any = llm.llm_engine.engine_core
    steps = 0
    step = core.engine_core.step_fn

    def step_and_kill() -> Any:
        nonlocal steps
        steps += 1
        if steps == 5:
            os.kill(core.engine_core.model_executor.workers[1].proc.pid, signal.SIGKILL)
        return step()

    core.engine_core.step_fn = step_and_kill
    try:
        serve(llm, 64)
        ended = "it did not"
    except Exception as error:
        ended = type(error).__name__
    core.shutdown()
    there = set(os.listdir("/dev/shm")) - shared
    left = sorted(name for name in there if not name.startswith(VLLMS_OWN) and left_by_us(name))
    return {"ended": ended, "left": left, "before": before, "after": serve(start(model, 1), 4)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
