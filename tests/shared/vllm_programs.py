"""vLLM in processes of its own: the programs of tests/vllm, and what goes into an engine there.

Imports nothing of vLLM: its tests and those that need a GPU use it, and the programs themselves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).resolve().parents[1] / "vllm"


def connector(**extra: Any) -> dict[str, Any]:
    """`kv_transfer_config` of Forebay's connector; `extra` are its options."""
    return {
        "kv_connector": "ForebayConnector",
        "kv_connector_module_path": "forebay.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host_bytes": "64MiB", **extra},
    }


def engine_options(model: str | Path, **more: Any) -> dict[str, Any]:
    """The arguments of an engine over a saved tiny model, for vLLM's `LLM` or `EngineArgs`."""
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "seed": 0,
        "max_model_len": 512,
        "max_num_batched_tokens": 128,
        "block_size": 32,
        **more,
    }


def asked(
    name: str,
    prompt: list[int],
    answer: int,
    abort: int | None = None,
    *,
    after: int = 0,
    hint: bool = False,
    lora: tuple[str, int, str] | None = None,
    images: Sequence[int] = (),
    apart: bool = False,
) -> dict[str, Any]:
    """A request of a round of `served`: asked `after` so many steps of the round, aborted after so
    many, if at all; as a hint that its session comes at once, if it is one; for the LoRA of that
    name, number and folder; with images of those seeds; `apart` from host memory.
    """
    request = {"name": name, "prompt": prompt, "answer": answer, "abort": abort}
    return {**request, "after": after, "hint": hint, "lora": lora, "images": images, "apart": apart}


def served(
    folder: Path,
    rounds: list[dict[str, Any]],
    engine: dict[str, Any],
    *,
    apart: bool = False,
    timeout_s: float = 280.0,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What `vllm_run.py` serves of `rounds` with an engine of those options, as it tells it."""
    plan, result = folder / "plan.json", folder / "result.json"
    plan.write_text(json.dumps({"rounds": rounds, "engine": engine, "apart": apart}))
    ran("vllm_run.py", plan, result, timeout_s=timeout_s, environment=environment)
    return json.loads(result.read_text())


def ran(
    program: str,
    *arguments: object,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> str:
    """What a program of `PROGRAMS` printed; it must end well."""
    path = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, PROGRAMS / program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert "nanobind: leaked" not in done.stderr, done.stderr[-3000:]
    return done.stdout
