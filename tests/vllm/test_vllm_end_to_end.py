"""vLLM's own engine on a CPU: greedy tokens are those that it gives without a connector."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")

import tiny_models
from vllm_programs import asked, connector, engine_options, ran, served
from vllm_ways import ENGINE, MOST_TOKENS, WAYS, not_gone, of_two_minds, rounds, unanswered, unlike

# Little room, so that requests are preempted; one running at a time lets others queue.
CROWDED = {"max_num_seqs": 4, "num_gpu_blocks_override": 34}
ONE_BY_ONE = {"max_num_seqs": 1, "num_gpu_blocks_override": 64}


def requests(seed: int, *, aborts: bool) -> list[dict[str, Any]]:
    """Ten requests of six conversations, four of which repeat an earlier prompt and go on."""
    dice = random.Random(seed)
    prompts = [[dice.randrange(3, 320) for _ in range(dice.randrange(150, 330))] for _ in range(6)]
    prompts += [[*prompts[place], *prompts[place + 1][:50]] for place in range(4)]
    return [
        asked(
            f"{seed}-{place}",
            prompt,
            dice.randrange(50, 120),
            12 + place if aborts and place in (2, 5) else None,
        )
        for place, prompt in enumerate(prompts)
    ]


def assert_only_the_last_differs(
    rounds: list[dict[str, list[int]]], right: dict[str, list[int]]
) -> None:
    """Answers of each round to the same prompts are `right`, as far as both were answered; those of
    the last, whose loads bring nothing, are not.
    """
    *kept, broken = (
        {
            name: said[: len(good)] == good[: len(said)]
            for (name, said), good in zip(each.items(), right.values(), strict=True)
        }
        for each in rounds
    )
    for each in kept:
        assert all(each.values()), each
    assert not all(broken.values()), "loads that bring nothing were not noticed"


@pytest.mark.timeout(600)
def test_greedy_tokens_are_those_without_a_connector(tiny_llama: Path, tmp_path: Path):
    with_aborts, plain = requests(1, aborts=True), requests(1, aborts=False)
    alone = served(tmp_path, [{"requests": plain}], engine_options(tiny_llama, **CROWDED))
    rounds = [
        {"requests": with_aborts},
        {"requests": renamed(plain, "b"), "reset": True},
        {"requests": renamed(with_aborts, "c"), "reset": True},
        {"requests": renamed(plain, "d"), "reset": True, "bring_nothing": True},
    ]
    ours = served(tmp_path, rounds, with_ours(tiny_llama, **CROWDED))
    assert_only_the_last_differs(ours["rounds"], alone["rounds"][0])
    assert ours["sources"]["host"] > 0
    assert ours["preempted"] > 0
    assert ours["free"] == ours["blocks"] - 1


@pytest.mark.timeout(600)
def test_prompts_that_are_found_whole_have_their_last_block_copied(
    tiny_llama: Path, tmp_path: Path
):
    dice = random.Random(3)
    wanted = [
        asked(f"3-{place}", [dice.randrange(3, 320) for _ in range(32 * (place + 3))], 20)
        for place in range(5)
    ]
    alone = served(tmp_path, [{"requests": wanted}], engine_options(tiny_llama, **ONE_BY_ONE))
    rounds = [
        {"requests": wanted},
        {"requests": renamed(wanted, "b")},
        {"requests": renamed(wanted, "c"), "reset": True},
        {"requests": renamed(wanted, "d"), "copy_nothing": True},
    ]
    ours = served(tmp_path, rounds, with_ours(tiny_llama, **ONE_BY_ONE))
    right = list(alone["rounds"][0].values())
    computed, on_device, in_host, broken = (list(each.values()) for each in ours["rounds"])
    assert computed == on_device == in_host == right
    assert broken != right, "last blocks that are not copied were not noticed"
    # All blocks but those that were computed first.
    assert ours["sources"]["recomputed"] == sum(range(3, 8))
    assert ours["free"] == ours["blocks"] - 1


@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_layers_that_look_back_through_a_window_give_the_tokens_that_they_give_alone(
    tmp_path: Path, family: str
):
    """Three groups of layers, prompts longer than the windows, little room."""
    model = tiny_models.build(family)
    model.save_pretrained(tmp_path / "model")
    crowded = {"max_num_seqs": 4, "num_gpu_blocks_override": 70}
    with_aborts, plain = requests(1, aborts=True), requests(1, aborts=False)
    alone = served(tmp_path, [{"requests": plain}], engine_options(tmp_path / "model", **crowded))
    rounds = [
        {"requests": with_aborts},
        {"requests": renamed(plain, "b"), "reset": True},
        {"requests": renamed(with_aborts, "c"), "reset": True},
        {"requests": renamed(plain, "d"), "reset": True, "bring_nothing": True},
    ]
    ours = served(tmp_path, rounds, with_ours(tmp_path / "model", **crowded))
    assert_only_the_last_differs(ours["rounds"], alone["rounds"][0])
    assert ours["sources"]["host"] > 50
    assert ours["preempted"] > 0
    assert ours["free"] == ours["blocks"] - 1


@pytest.mark.timeout(600)
def test_a_step_is_held_until_what_it_reads_has_landed(tiny_llama: Path, tmp_path: Path):
    """An idle engine schedules a request before its loads have ended."""
    dice = random.Random(4)
    wanted = [asked("4-0", [dice.randrange(3, 320) for _ in range(32 * 9)], 20)]
    rounds = [
        {"requests": wanted},
        {"requests": renamed(wanted, "b"), "reset": True},
        {"requests": renamed(wanted, "c"), "reset": True, "hold": True},
        {"requests": renamed(wanted, "d"), "reset": True, "hold": True, "launch_at_once": True},
    ]
    ours = served(tmp_path, rounds, with_ours(tiny_llama, **ONE_BY_ONE))
    right, found, held, broken = (list(each.values()) for each in ours["rounds"])
    assert right == found == held
    assert broken != right, "a step that ran before its loads had landed was not noticed"
    assert ours["sources"]["host"] == 3 * 9
    assert ours["free"] == ours["blocks"] - 1


@pytest.mark.timeout(600)
def test_queued_requests_find_their_kv_on_the_device(tiny_llama: Path, tmp_path: Path):
    wanted = requests(2, aborts=False)
    # While it is answered the others queue, and vLLM does not look at them.
    first = asked("first", [7] * 200, 60)
    alone = served(tmp_path, [{"requests": wanted}], engine_options(tiny_llama, **ONE_BY_ONE))
    rounds = [
        {"requests": wanted},
        {"requests": [first, *renamed(wanted, "b")], "reset": True},
    ]
    ours = served(tmp_path, rounds, with_ours(tiny_llama, **ONE_BY_ONE))
    before, after = ours["rounds"]
    del after["first"]
    assert before == alone["rounds"][0]
    assert list(after.values()) == list(before.values())
    assert ours["prefetched"]["used"] > 0
    assert ours["sources"]["host"] > 30


@pytest.mark.timeout(900)
def test_two_workers_that_share_each_block_give_the_same_tokens(tiny_llama: Path, tmp_path: Path):
    wanted = requests(4, aborts=False)
    two = {**CROWDED, "tensor_parallel_size": 2}
    alone = served(tmp_path, [{"requests": wanted}], engine_options(tiny_llama, **two))
    rounds = [
        {"requests": requests(4, aborts=True)},
        {"requests": renamed(wanted, "b"), "reset": True},
        {"requests": renamed(wanted, "c"), "reset": True, "bring_nothing": True},
    ]
    ours = served(tmp_path, rounds, with_ours(tiny_llama, **two))
    assert_only_the_last_differs(ours["rounds"], alone["rounds"][0])
    assert ours["sources"]["host"] > 0
    assert ours["free"] == ours["blocks"] - 1


@pytest.mark.timeout(900)
def test_stages_of_unequal_length_give_the_tokens_that_they_give_alone(
    tiny_llama: Path, tmp_path: Path
):
    """Three layers over two stages: with aborts and preemption, and a load that fails in one."""
    stages = {**CROWDED, "pipeline_parallel_size": 2}
    wanted = requests(4, aborts=False)
    alone = served(tmp_path, [{"requests": wanted}], engine_options(tiny_llama, **stages))
    rounds = [
        {"requests": requests(4, aborts=True)},
        {"requests": renamed(wanted, "b"), "reset": True},
        {"requests": renamed(wanted, "c"), "reset": True, "fail_load_at": 1},
        # With a block out of use vLLM cannot be reset; but all do not fit into its pool.
        {"requests": renamed(wanted, "d"), "bring_nothing_at": 0},
    ]
    ours = served(tmp_path, rounds, with_ours(tiny_llama, {"window_bytes": 1}, **stages))
    assert_only_the_last_differs(ours["rounds"], alone["rounds"][0])
    assert ours["sources"]["host"] > 0
    assert ours["preempted"] > 0
    assert ours["failed_loads"] == 1
    # One block is out of use with the copy that failed.
    assert ours["free"] == ours["blocks"] - 2
    assert_shared(ours, layers=[2, 1])


@pytest.mark.timeout(900)
def test_stages_of_two_workers_each_find_what_was_saved(tiny_llama: Path, tmp_path: Path):
    """Tensor and pipeline parallelism together."""
    four = {**ONE_BY_ONE, "pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    wanted = [{**each, "answer": 10} for each in requests(5, aborts=False)[:3]]
    rounds = [
        {"requests": wanted},
        {"requests": renamed(wanted, "b"), "reset": True},
        {"requests": renamed(wanted, "c"), "reset": True, "bring_nothing_at": 3},
    ]
    ours = served(tmp_path, rounds, with_ours(tiny_llama, **four), timeout_s=600)
    computed, loaded, broken = (list(each.values()) for each in ours["rounds"])
    assert loaded == computed
    assert broken != computed, "a worker whose loads bring nothing was not noticed"
    whole = sum((len(each["prompt"]) - 1) // 32 for each in wanted)
    assert ours["sources"]["host"] == 2 * whole
    assert ours["free"] == ours["blocks"] - 1
    assert_shared(ours, layers=[2, 2, 1, 1])


@pytest.mark.timeout(900)
def test_engines_side_by_side_each_have_host_memory_of_their_own(tiny_llama: Path):
    told = json.loads(ran("vllm_side_by_side.py", tiny_llama, timeout_s=600).splitlines()[-1])
    assert told["before"] == told["after"]
    # After the reset the engines' own caches had nothing but what was loaded.
    assert told["cached"] == [192] * len(told["cached"])


@pytest.mark.timeout(600)
def test_all_ways_to_its_kv_give_a_prompt_the_same_tokens(tmp_path: Path):
    """In float32; in vLLM's batch-invariant mode on a GPU tests/gpu asks for the same bits."""
    model = tiny_models.build("llama", head_dim=32, max_position_embeddings=MOST_TOKENS)
    model.save_pretrained(tmp_path / "model")
    # Fewer blocks than all prompts have, so that some are preempted.
    ours = with_ours(tmp_path / "model", num_gpu_blocks_override=70, **ENGINE)
    told = served(tmp_path, rounds(), ours)
    assert of_two_minds(told) == []
    assert [(way, found) for way in WAYS if (found := unlike(told, way))] == []
    assert [(way, found) for way in WAYS if (found := unanswered(told, way))] == []
    assert not_gone(told) == []


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
    named = connector()
    del named["kv_connector_module_path"]
    wanted = requests(3, aborts=False)[:3]
    rounds = [{"requests": wanted}, {"requests": wanted, "reset": True}]
    ours = served(
        tmp_path,
        rounds,
        engine_options(tiny_llama, kv_transfer_config=named, **ONE_BY_ONE),
        apart=True,
    )
    first, second = ours["rounds"]
    assert first == second
    # After the reset vLLM's own cache had nothing but what was loaded.
    whole = sum((len(each["prompt"]) - 1) // 32 * 32 for each in wanted)
    assert ours["hits"][1] - ours["hits"][0] == whole


def with_ours(model: Path, extra: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """The arguments of an engine with the connector; `extra` are options of that."""
    return engine_options(model, kv_transfer_config=connector(**(extra or {})), **more)


def renamed(wanted: list[dict[str, Any]], letter: str) -> list[dict[str, Any]]:
    return [{**each, "name": f"{letter}-{place}"} for place, each in enumerate(wanted)]


def assert_shared(told: dict[str, Any], layers: list[int]) -> None:
    """All workers have as many host slots, of the layers that each has, and all memory is used."""
    slots, sizes = zip(*told["host"], strict=True)
    assert len(set(slots)) == 1
    assert [size // sizes[-1] for size in sizes] == layers
    assert 0 <= (64 << 20) - slots[0] * sum(sizes) < sum(sizes)
