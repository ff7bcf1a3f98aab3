"""A program that runs vLLM's engine in this process, for the tests: what it serves goes to a file.

    python vllm_run.py PLAN.json RESULT.json

The plan has the engine's arguments, and rounds: each a list of requests as `vllm_programs.asked`
makes them. Before a round the engine may be told to reset its prefix cache ("reset"), and host
memory with it ("forget"), what lies in host memory to change places ("swap"), and loads to stand
still for half a second ("hold"), and a load to fail in the worker of one rank ("fail_load_at").
From then on loads may bring nothing ("bring_nothing", or "bring_nothing_at" in the worker of one
rank), last blocks may not be copied ("copy_nothing"), and steps may not be held until what they
read has landed ("launch_at_once"). With "apart" the engine runs in a process of its own, as it does
for everybody. Several workers do so in any case.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tiny_sights import image_of
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm_latent import begin_behind_prefixes, is_latent

from forebay.transfer.messages import Completion, Direction, Outcome, Transfer
from forebay.vllm.worker import WorkerHalf

_MOST_STEPS = 20_000
_LANES = (0, 1)


def greedy(count: int, *, hint: bool = False, apart: bool = False) -> SamplingParams:
    """`count` tokens, each the likeliest."""
    wish: dict[str, Any] = {"no_cache": True, "no_save": True} if apart else {}
    if hint:
        wish["hint"] = {}
    wishes = {"kv_transfer_params": {"forebay": wish}} if wish else None
    return SamplingParams(
        temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, extra_args=wishes
    )


def serve_apart(llm: LLM, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The tokens of all requests, from an engine in another process, and its prefix-cache hits."""
    served: list[dict[str, list[int]]] = []
    hits: list[int] = []
    for each in rounds:
        if each.get("reset"):
            assert llm.reset_prefix_cache()
        asked = each["requests"]
        outputs = llm.generate(
            [{"prompt_token_ids": one["prompt"]} for one in asked],
            [greedy(one["answer"]) for one in asked],
            use_tqdm=False,
        )
        said = [list(output.outputs[0].token_ids) for output in outputs]
        served.append(dict(zip([one["name"] for one in asked], said, strict=True)))
        found = [m.value for m in llm.get_metrics() if m.name == "vllm:prefix_cache_hits"]
        hits.append(sum(found))
    return {"rounds": served, "hits": hits}


def prompt_of(asked: dict[str, Any]) -> dict[str, Any]:
    """The prompt of a request, as vLLM takes it; its images are noise."""
    prompt: dict[str, Any] = {"prompt_token_ids": asked["prompt"]}
    if asked["images"]:
        prompt["multi_modal_data"] = {"image": [image_of(seed) for seed in asked["images"]]}
    return prompt


def serve(engine: Any, requests: list[dict[str, Any]]) -> dict[str, list[int]]:
    """The tokens of each request; of an aborted one those that came before."""
    answers: dict[str, list[int]] = {asked["name"]: [] for asked in requests}
    coming = sorted(requests, key=lambda asked: asked["after"])
    aborts = {asked["name"]: asked["abort"] for asked in requests if asked["abort"] is not None}
    for step in range(_MOST_STEPS):
        while coming and coming[0]["after"] <= step:
            asked = coming.pop(0)
            params = greedy(asked["answer"], hint=asked["hint"], apart=asked["apart"])
            prompt = prompt_of(asked)
            lora = LoRARequest(*asked["lora"]) if asked["lora"] else None
            engine.add_request(asked["name"], prompt, params, lora_request=lora)
        if engine.has_unfinished_requests():
            for output in engine.step():
                answers[output.request_id] = list(output.outputs[0].token_ids)
        elif not coming:
            return answers
        engine.abort_request([name for name, after in aborts.items() if after == step])
    raise SystemExit(f"requests are stuck after {_MOST_STEPS} steps")


def fork_workers() -> None:
    """Workers need not import vLLM again, which takes each of them most of a minute.

    On a CPU only: with GPUs vLLM forks by itself, or knows why it must not.
    """
    if not current_platform.is_cpu():
        return
    executor: Any = importlib.import_module("vllm.v1.executor.multiproc_executor")
    executor.get_mp_context = lambda: multiprocessing.get_context("fork")


def let_look_at_libraries() -> None:
    """vLLM asks everything that is loaded for its attributes, where it has no Triton; and the
    library behind numba, with which it looks for n-grams, has every name as a function.
    """
    if not current_platform.is_cpu():
        return
    library: Any = importlib.import_module("llvmlite.binding.ffi")
    by_name = library._lib_wrapper.__getattr__

    def named(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return by_name(self, name)

    library._lib_wrapper.__getattr__ = named


def warm_up(worker: Any) -> None:
    """What a worker of a later stage copies its input to is made by a first pass, which vLLM leaves
    out on a CPU where it compiles nothing.
    """
    if current_platform.is_cpu():
        worker.model_runner.profile_run()


def bring_nothing(worker: Any, rank: int = -1) -> None:
    """The mutant, in a worker, or in that of a rank: loads say that they are done, and have copied
    nothing.
    """
    if rank not in (-1, worker.rank):
        return
    submit = WorkerHalf.submit

    def mutant(self: WorkerHalf, transfers: Sequence[Transfer]) -> None:
        submit(self, [each for each in transfers if each.direction is Direction.SAVE])
        now_s = time.monotonic()
        for each in transfers:
            if each.direction is Direction.LOAD:
                count = len(each.sources)
                self._issued.append(each.id)
                self._completions.append(
                    Completion(each.id, Outcome.DONE, count, count, 1, now_s, now_s, "")
                )

    WorkerHalf.submit = mutant


def fail_load(worker: Any, rank: int) -> None:
    """In the worker of this rank the next window but four of loads fails."""
    if rank == worker.rank:
        transfer: Any = importlib.import_module("vllm.distributed.kv_transfer")
        core = transfer.get_kv_transfer_group().worker_half._mover.core
        core.fail_window(Direction.LOAD, 4)


def copy_nothing(worker: Any) -> None:
    """A third mutant, in a worker: no last block is copied."""
    begin = WorkerHalf.begin
    WorkerHalf.begin = lambda self, orders: begin(self, dataclasses.replace(orders, copies=()))


def launch_at_once(worker: Any) -> None:
    """And another: no step is held until loads have landed that vLLM finds already."""
    WorkerHalf.expect = lambda self, loads: True


def hold_loads(worker: Any) -> None:
    """No load goes on in a worker for half a second."""
    transfer: Any = importlib.import_module("vllm.distributed.kv_transfer")
    core = transfer.get_kv_transfer_group().worker_half._mover.core
    for lane in _LANES:
        core.hold_lane(Direction.LOAD, lane)
    let_go = threading.Timer(
        0.5, lambda: [core.release_lane(Direction.LOAD, lane) for lane in _LANES]
    )
    let_go.daemon = True
    let_go.start()


def swap_blocks(worker: Any) -> None:
    """The other mutant, in a worker: every block in host memory lies where another one was."""
    transfer: Any = importlib.import_module("vllm.distributed.kv_transfer")
    half = transfer.get_kv_transfer_group().worker_half
    blocks = half._host._arena.blocks(half._host._slots, half._host._block_bytes)
    blocks[:] = np.roll(blocks, 1, axis=0)


def tensors(worker: Any) -> int:
    """In how many tensors each block of vLLM's lies, in a worker."""
    transfer: Any = importlib.import_module("vllm.distributed.kv_transfer")
    parts = transfer.get_kv_transfer_group().worker_half._parts
    return len({part.untyped_storage().data_ptr() for part in parts})


def host_memory(worker: Any) -> tuple[int, int]:
    """How many host slots a worker has, and of how many bytes."""
    transfer: Any = importlib.import_module("vllm.distributed.kv_transfer")
    host = transfer.get_kv_transfer_group().worker_half._host
    return host._slots, host._block_bytes


def count_preemptions(scheduler: Any) -> list[str]:
    """Names of requests that vLLM's scheduler preempts from now on."""
    names: list[str] = []
    schedule = scheduler.schedule

    def counted(*arguments: Any, **more: Any) -> Any:
        output = schedule(*arguments, **more)
        names.extend(output.preempted_req_ids or ())
        return output

    scheduler.schedule = counted
    return names


def count_guesses(scheduler: Any) -> list[tuple[int, int]]:
    """How many tokens are guessed of a request in a step, and how many of them right, each time
    from now on.
    """
    guesses: list[tuple[int, int]] = []
    told = scheduler.make_spec_decoding_stats

    def counted(*arguments: Any, **more: Any) -> Any:
        guesses.append((more["num_draft_tokens"], more["num_accepted_tokens"]))
        return told(*arguments, **more)

    scheduler.make_spec_decoding_stats = counted
    return guesses


def count_near() -> list[int]:
    """Loads for which a worker in this process holds a step, from now on."""
    near: list[int] = []
    expect = WorkerHalf.expect

    def counted(self: WorkerHalf, loads: Sequence[int]) -> bool:
        there = expect(self, loads)
        near.extend(loads if there else ())
        return there

    WorkerHalf.expect = counted
    return near


def change_workers(llm: LLM, round_: dict[str, Any]) -> None:
    """What a round asks for in all workers, or in that of one rank."""
    for name, change in IN_ALL.items():
        if round_.get(name):
            llm.collective_rpc(change)
    for name, change_one in IN_ONE.items():
        if name in round_:
            llm.collective_rpc(change_one, args=(round_[name],))


IN_ALL = {
    "swap": swap_blocks,
    "bring_nothing": bring_nothing,
    "copy_nothing": copy_nothing,
    "launch_at_once": launch_at_once,
    "hold": hold_loads,
}
IN_ONE = {"bring_nothing_at": bring_nothing, "fail_load_at": fail_load}


def main(plan: dict[str, Any]) -> dict[str, Any]:
    """Serve all rounds of `plan`."""
    fork_workers()
    if current_platform.is_cpu() and is_latent(plan["engine"]["model"]):
        begin_behind_prefixes()
    if plan["engine"].get("speculative_config"):
        let_look_at_libraries()
    llm = LLM(**plan["engine"], disable_log_stats=not plan["apart"])
    if plan["engine"].get("pipeline_parallel_size", 1) > 1:
        llm.collective_rpc(warm_up)
    if plan["apart"]:
        return serve_apart(llm, plan["rounds"])
    core = llm.llm_engine.engine_core.engine_core
    preempted, near = count_preemptions(core.scheduler), count_near()
    guesses = count_guesses(core.scheduler)
    rounds: list[dict[str, list[int]]] = []
    drafts: list[list[int]] = []
    for each in plan["rounds"]:
        if each.get("reset"):
            assert llm.reset_prefix_cache()
        if each.get("forget"):
            assert llm.reset_prefix_cache(reset_connector=True)
        change_workers(llm, each)
        rounds.append(serve(llm.llm_engine, each["requests"]))
        while core.scheduler.has_requests():
            core.step_fn()
        drafts.append([sum(count) for count in zip(*guesses, strict=True)])
        guesses.clear()
    pool = core.scheduler.kv_cache_manager.block_pool
    result: dict[str, Any] = {
        "rounds": rounds,
        "free": pool.get_num_free_blocks(),
        "blocks": pool.num_gpu_blocks,
        "preempted": len(preempted),
        "near": len(near),
        "drafts": drafts,
    }
    if core.scheduler.connector is not None:
        half = core.scheduler.connector.scheduler_half
        stats = half.stats()
        result["hints"] = {each.value: count for each, count in half._hints.outcomes.items()}
        result["sources"] = {source.value: count for source, count in stats.sources.items()}
        result["prefetched"] = stats.prefetch_bytes
        result["block_bytes"] = core.scheduler.connector._shape.block_bytes
        result["failed_loads"] = stats.failed_loads
        result["host"] = llm.collective_rpc(host_memory)
        result["tensors"] = llm.collective_rpc(tensors)
    return result


if __name__ == "__main__":
    asked_for = json.loads(Path(sys.argv[1]).read_text())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(asked_for["apart"]))
    done = main(asked_for)
    Path(sys.argv[2]).write_text(json.dumps(done))
