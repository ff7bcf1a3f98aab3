"""vLLM's own engine on a CPU: greedy tokens are those that it gives without a connector."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")

PROGRAMS = Path(__file__).parent
# Little room, so that requests are preempted; one running at a time lets others queue.
CROWDED = {"max_num_seqs": 4, "num_gpu_blocks_override": 34}
ONE_BY_ONE = {"max_num_seqs": 1, "num_gpu_blocks_override": 64}
ENGINE = {"max_model_len": 512, "max_num_batched_tokens": 128, "block_size": 32}
CONNECTOR = {
    "kv_connector": "ForebayConnector",
    "kv_connector_module_path": "forebay.vllm.connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"host_bytes": "64MiB"},
}


def requests(seed: int, *, aborts: bool) -> list[dict[str, Any]]:
    """Ten requests of six conversations, four of which repeat an earlier prompt and go on."""
    dice = random.Random(seed)
    prompts = [[dice.randrange(3, 320) for _ in range(dice.randrange(150, 330))] for _ in range(6)]
    prompts += [[*prompts[place], *prompts[place + 1][:50]] for place in range(4)]
    return [
        {
            "name": f"{seed}-{place}",
            "prompt": prompt,
            "answer": dice.randrange(50, 120),
            "abort": 12 + place if aborts and place in (2, 5) else None,
        }
        for place, prompt in enumerate(prompts)
    ]


def ran(program: str, *arguments: object, timeout_s: float) -> str:
    """What a program beside this file printed; it must end well."""
    done = subprocess.run(
        [sys.executable, PROGRAMS / program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def served(
    model: Path,
    folder: Path,
    rounds: list[dict[str, Any]],
    engine: dict[str, int],
    connector: Any,
    *,
    apart: bool = False,
) -> dict[str, Any]:
    plan, result = folder / "plan.json", folder / "result.json"
    plan.write_text(
        json.dumps(
            {
                "rounds": rounds,
                "engine": {**ENGINE, **engine},
                "connector": connector,
                "apart": apart,
            }
        )
    )
    ran("vllm_run.py", model, plan, result, timeout_s=280)
    return json.loads(result.read_text())


def equal_as_far(one: dict[str, list[int]], other: dict[str, list[int]]) -> dict[str, bool]:
    """For each request whether its tokens are the same, as far as both were answered."""
    return {name: one[name][: len(other[name])] == other[name][: len(one[name])] for name in one}


@pytest.mark.timeout(600)
def test_greedy_tokens_are_those_without_a_connector(tiny_llama: Path, tmp_path: Path):
    with_aborts, plain = requests(1, aborts=True), requests(1, aborts=False)
    alone = served(tiny_llama, tmp_path, [{"requests": plain}], CROWDED, None)
    rounds = [
        {"requests": with_aborts},
        {"requests": renamed(plain, "b"), "reset": True},
        {"requests": renamed(with_aborts, "c"), "reset": True},
        {"requests": renamed(plain, "d"), "reset": True, "bring_nothing": True},
    ]
    ours = served(tiny_llama, tmp_path, rounds, CROWDED, CONNECTOR)
    right = alone["rounds"][0]
    *kept, broken = (
        equal_as_far(right, {f"1-{name.split('-')[1]}": said for name, said in each.items()})
        for each in ours["rounds"]
    )
    for each in kept:
        assert all(each.values()), each
    assert not all(broken.values()), "loads that bring nothing were not noticed"
    assert ours["sources"]["host"] > 0
    assert ours["preempted"] > 0
    assert ours["free"] == ours["blocks"] - 1


@pytest.mark.timeout(600)
def test_queued_requests_find_their_kv_on_the_device(tiny_llama: Path, tmp_path: Path):
    asked = requests(2, aborts=False)
    # While it is answered the others queue, and vLLM does not look at them.
    first = {"name": "first", "prompt": [7] * 200, "answer": 60, "abort": None}
    alone = served(tiny_llama, tmp_path, [{"requests": asked}], ONE_BY_ONE, None)
    rounds = [
        {"requests": asked},
        {"requests": [first, *renamed(asked, "b")], "reset": True},
    ]
    ours = served(tiny_llama, tmp_path, rounds, ONE_BY_ONE, CONNECTOR)
    before, after = ours["rounds"]
    del after["first"]
    assert before == alone["rounds"][0]
    assert list(after.values()) == list(before.values())
    assert ours["prefetched"]["used"] > 0
    assert ours["sources"]["host"] > 30


@pytest.mark.timeout(900)
def test_two_workers_that_share_each_block_give_the_same_tokens(tiny_llama: Path, tmp_path: Path):
    asked = requests(4, aborts=False)
    two = {**CROWDED, "tensor_parallel_size": 2}
    alone = served(tiny_llama, tmp_path, [{"requests": asked}], two, None)
    rounds = [
        {"requests": requests(4, aborts=True)},
        {"requests": renamed(asked, "b"), "reset": True},
        {"requests": renamed(asked, "c"), "reset": True, "bring_nothing": True},
    ]
    ours = served(tiny_llama, tmp_path, rounds, two, CONNECTOR)
    first, second, broken = (
        equal_as_far(
            alone["rounds"][0],
            {f"4-{name.split('-')[1]}": said for name, said in each.items()},
        )
        for each in ours["rounds"]
    )
    assert all(first.values()), first
    assert all(second.values()), second
    assert not all(broken.values()), "loads that bring nothing were not noticed"
    assert ours["sources"]["host"] > 0
    assert ours["free"] == ours["blocks"] - 1


@pytest.mark.timeout(900)
def test_engines_side_by_side_each_have_host_memory_of_their_own(tiny_llama: Path):
    told = json.loads(ran("vllm_side_by_side.py", tiny_llama, timeout_s=600).splitlines()[-1])
    assert told["before"] == told["after"]
    # After the reset the engines' own caches had nothing but what was loaded.
    assert told["cached"] == [192] * len(told["cached"])


@pytest.mark.timeout(600)
def test_a_worker_that_dies_ends_the_engine_and_leaves_nothing(tiny_llama: Path):
    """LMCache 4980: within the bound of this call, and another engine starts afterwards."""
    told = json.loads(ran("vllm_worker_dies.py", tiny_llama, timeout_s=400).splitlines()[-1])
    assert told["ended"] != "it did not"
    assert told["left"] == []
    assert told["after"] == told["before"]


@pytest.mark.timeout(600)
def test_the_connector_is_found_by_its_name_in_the_engines_own_process(
    tiny_llama: Path, tmp_path: Path
):
    if not any(point.name == "forebay" for point in entry_points(group="vllm.general_plugins")):
        pytest.skip("Forebay is not installed here: `make vllm` does it")
    named = {name: value for name, value in CONNECTOR.items() if "module" not in name}
    asked = requests(3, aborts=False)[:3]
    rounds = [{"requests": asked}, {"requests": asked, "reset": True}]
    ours = served(tiny_llama, tmp_path, rounds, ONE_BY_ONE, named, apart=True)
    first, second = ours["rounds"]
    assert first == second
    # After the reset vLLM's own cache had nothing but what was loaded.
    whole = sum((len(each["prompt"]) - 1) // 32 * 32 for each in asked)
    assert ours["hits"][1] - ours["hits"][0] == whole


def renamed(asked: list[dict[str, Any]], letter: str) -> list[dict[str, Any]]:
    return [{**each, "name": f"{letter}-{place}"} for place, each in enumerate(asked)]
