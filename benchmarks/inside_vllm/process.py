"""One arm in a process of its own: starts an engine, then runs the workloads it is told to."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import os
import random
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from arms import Arm
from client import Client, changes, counters
from memory import memory, settled
from sizes import Sizes
from weights import ATTENTION_GAIN, WEIGHTS_SEED, time_kv_memory, write_model
from workloads import WORKLOADS, Round


def preload() -> None:
    """Import what every arm needs, so that arms that are forked later need not."""
    for name in ("vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.worker.gpu_worker"):
        importlib.import_module(name)
    torch: Any = importlib.import_module("torch")
    if torch.cuda.is_initialized():
        # What was forked could not use the GPU: vLLM has to start its processes anew.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"


def serve(arm: Arm, sizes: Sizes, folder: Path, pipe: Connection) -> None:
    """Start the arm's engine, say so, and answer orders until one is None.

    An order is a workload's name and a round's number; the answer is ("done", its raw samples), or
    ("failed", what was wrong).
    """
    os.setsid()
    log = os.open(folder / f"{arm.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.environ.update(arm.environment)
    try:
        asyncio.run(_serve(arm, sizes, folder, pipe))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))


async def _serve(arm: Arm, sizes: Sizes, folder: Path, pipe: Connection) -> None:
    time_kv_memory(importlib.import_module("vllm.v1.worker.gpu_worker").Worker)
    before = memory()
    began_s = time.perf_counter()
    engine = _engine(arm, sizes, folder)
    start_s = time.perf_counter() - began_s
    try:
        client = Client(engine, sizes, tier=arm.connector is not None)
        filled = await client.fill_weights(ATTENTION_GAIN)
        kv_s = await engine.collective_rpc("seconds_for_kv_memory")
        told = {
            "engine_start_s": start_s,
            "kv_memory_s": kv_s,
            "weights": {"filled": filled, "seed": WEIGHTS_SEED, "attention_gain": ATTENTION_GAIN},
            "memory_before": before,
            **await settled(),
        }
        pipe.send(("ready", told))
        loop = asyncio.get_running_loop()
        while (order := await loop.run_in_executor(None, pipe.recv)) is not None:
            pipe.send(("done", await _run(client, arm, *order)))
    finally:
        engine.shutdown()


def _engine(arm: Arm, sizes: Sizes, folder: Path) -> Any:
    arguments: Any = importlib.import_module("vllm.engine.arg_utils")
    async_llm: Any = importlib.import_module("vllm.v1.engine.async_llm")
    config: Any = importlib.import_module("vllm.config")
    options = arm.engine_options(sizes, write_model(sizes, folder / "model"))
    if "kv_transfer_config" in options:
        options["kv_transfer_config"] = config.KVTransferConfig(**options["kv_transfer_config"])
    return async_llm.AsyncLLM.from_engine_args(arguments.AsyncEngineArgs(**options))


async def _run(client: Client, arm: Arm, workload: str, number: int) -> dict[str, Any]:
    client.dice = random.Random(f"{workload} {number}")
    before = counters()
    began = time.time()
    raw = await WORKLOADS[workload](
        client, Round(number, tier=arm.connector is not None, ours=arm.ours)
    )
    # Counters of a step reach this process behind its tokens.
    await asyncio.sleep(0.3)
    return {
        "workload": workload,
        "round": number,
        "began_unix_s": began,
        "raw": raw,
        "counted": changes(before, counters()),
        "memory": memory(),
    }


def described(arm: Arm, sizes: Sizes) -> dict[str, Any]:
    """An arm and its sizes as plain values."""
    return {
        "arm": dataclasses.asdict(arm),
        "engine": arm.engine_options(sizes, "model"),
        "sizes": dataclasses.asdict(sizes),
        "token_bytes": sizes.token_bytes,
    }


def end_group(pid: int) -> None:
    """End the process `pid` and all that it started; they are a process group of their own."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
