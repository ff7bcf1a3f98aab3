"""A model that sees images in vLLM's own engine on a CPU: over KV from host memory, greedy tokens
are those that it gives without a connector.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")

import tiny_llava
from vllm_programs import asked, connector, engine_options, served

BLOCK_TOKENS = 32
# One running at a time: the others queue, and their KV is prefetched.
ENGINE = {
    "max_num_seqs": 1,
    "num_gpu_blocks_override": 64,
    "skip_tokenizer_init": False,
    # vLLM's own Llava needs packages that are not there.
    "model_impl": "transformers",
}


def prompts() -> list[dict[str, Any]]:
    """In pairs that differ in nothing but an image, and in text alone."""
    dice = random.Random(6)
    made: list[tuple[list[int], list[list[int]]]] = []
    for before, between, after in ((40, None, 90), (0, 3, 60), (64, 0, 31), (5, 100, 0)):
        text = [[dice.randrange(3, 300) for _ in range(count or 0)] for count in (before, after)]
        middle = [dice.randrange(3, 300) for _ in range(between or 0)]
        second = [] if between is None else [tiny_llava.IMAGE]
        prompt = [*text[0], tiny_llava.IMAGE, *middle, *second, *text[1]]
        made.append((prompt, [[1, 2][: 1 + len(second)], [3, 2][: 1 + len(second)]]))
    wanted = [
        asked(f"{place}-{letter}", prompt, 24, images=images)
        for place, (prompt, pair) in enumerate(made)
        for letter, images in zip("ab", pair, strict=True)
    ]
    return [*wanted, asked("text", [dice.randrange(3, 300) for _ in range(200)], 24)]


@pytest.mark.timeout(600)
def test_images_are_told_apart_in_host_memory(tmp_path: Path):
    tiny_llava.save(tmp_path / "model")
    wanted = prompts()
    engine = engine_options(tmp_path / "model", **ENGINE)
    alone = served(tmp_path, [{"requests": wanted}], engine)["rounds"][0]
    rounds = [
        {"requests": wanted},
        {"requests": wanted, "reset": True},
        {"requests": wanted[::-1], "reset": True},
        {"requests": wanted, "reset": True, "swap": True},
    ]
    role = {**connector(), "kv_role": "kv_producer"}
    ours = served(tmp_path, rounds, {**engine, "kv_transfer_config": role})
    computed, in_host, backwards, swapped = ours["rounds"]
    assert computed == in_host == backwards == alone
    for place in range(4):
        assert alone[f"{place}-a"] != alone[f"{place}-b"], "images that are not seen show nothing"
    wrong = [name for name in computed if swapped[name] != computed[name]]
    assert len(wrong) > len(wanted) // 2, "blocks that lie in each other's places were not noticed"
    lengths = [
        len(each["prompt"]) + len(each["images"]) * (tiny_llava.IMAGE_TOKENS - 1) for each in wanted
    ]
    # But for blocks that the second of a pair finds on the device.
    whole = sum((length - 1) // BLOCK_TOKENS for length in lengths)
    assert ours["sources"]["host"] > 2 * 0.8 * whole
    assert ours["prefetched"]["used"] > 0
    assert ours["free"] == ours["blocks"] - 1
