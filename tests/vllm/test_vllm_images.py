"""Models that see images in vLLM's own engine on a CPU: over KV from host memory, greedy tokens are
those that they give without a connector.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")

from tiny_sights import SIGHTS
from vllm_programs import connector, engine_options, served
from vllm_sights import prompts, whole_blocks

# One running at a time: the others queue, and their KV is prefetched.
ENGINE = {"max_num_seqs": 1, "num_gpu_blocks_override": 64, "skip_tokenizer_init": False}
BLOCK_TOKENS = 32


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SIGHTS)
def test_images_are_told_apart_in_host_memory(tmp_path: Path, name: str):
    if name != "llava" and importlib.util.find_spec("torchvision") is None:
        pytest.skip("its processor needs torchvision")
    # vLLM's own Llava needs packages that are not there.
    how = {"model_impl": "transformers"} if name == "llava" else {}
    sight = SIGHTS[name]
    sight.save(tmp_path / "model", 32)
    wanted = prompts(sight)
    engine = engine_options(tmp_path / "model", **ENGINE, **how)
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
    # But for blocks that the second of a pair finds on the device.
    assert ours["sources"]["host"] > 2 * 0.8 * whole_blocks(sight, wanted, BLOCK_TOKENS)
    assert ours["prefetched"]["used"] > 0
    assert ours["free"] == ours["blocks"] - 1
