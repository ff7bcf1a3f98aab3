"""A load generator that people use, unmodified, against a server: `make loadgen` installs it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from server_rig import Served

from forebay.engine.models import LoadedModel

ROOT = Path(__file__).resolve().parents[2]
AIPERF = Path(os.environ.get("LOADGEN", ".venv-loadgen"), "bin", "aiperf")
CLIENTS, TURNS, ANSWER_TOKENS = 3, 2, 12
HUB = ("HF_HUB_", "PYTHON")


@pytest.mark.timeout(400)
def test_aiperf_finds_every_answer_whole(served: Served, tiny: LoadedModel, tmp_path: Path):
    tiny.tokenizer.save_pretrained(tmp_path / "tokenizer")
    # A path is no path to it while the hub's client is offline.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(HUB)}
    words = [
        *("profile", "--ui", "none"),
        *("--model", "tiny", "--url", served.url, "--tokenizer", str(tmp_path / "tokenizer")),
        *("--endpoint-type", "chat", "--streaming", "--use-server-token-count"),
        *("--concurrency", str(CLIENTS), "--conversation-num", str(CLIENTS)),
        *("--conversation-turn-mean", str(TURNS), "--request-count", str(CLIENTS * TURNS)),
        *("--synthetic-input-tokens-mean", "100"),
        *("--output-tokens-mean", str(ANSWER_TOKENS), "--extra-inputs", "ignore_eos:true"),
    ]
    report = reported(words, environment, tmp_path)
    assert report["error_summary"] == []
    assert report["request_count"]["avg"] == CLIENTS * TURNS
    assert report["usage_completion_tokens"]["min"] == ANSWER_TOKENS
    assert report["usage_completion_tokens"]["max"] == ANSWER_TOKENS
    assert report["time_to_first_token"]["count"] == CLIENTS * TURNS
    # Only second turns repeat anything, and they repeat whole blocks.
    assert report["usage_prompt_cache_read_tokens"]["max"] >= 96
    served.until_idle()


@pytest.mark.timeout(400)
def test_a_trace_is_played_as_documented(served: Served, tiny: LoadedModel, tmp_path: Path):
    words = documented("mooncake_trace")
    for name, value in {"--model": "tiny", "--url": served.url, "--tokenizer": "own/tiny"}.items():
        words[words.index(name) + 1] = value
    cached = tmp_path / "hub" / "models--own--tiny"
    tiny.tokenizer.save_pretrained(cached / "snapshots" / "1")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("1")
    lengths = {"input_length": 1100, "output_length": 8}
    trace = [{"timestamp": 900 * i, **lengths, "hash_ids": [0, 1, 2 + i]} for i in range(3)]
    (tmp_path / "trace.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in trace))
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    report = reported(words[1:], environment, tmp_path)
    assert report["error_summary"] == []
    assert report["request_count"]["avg"] == 3
    # Two blocks of 512 tokens, but for what the chat template puts around them.
    assert 960 <= report["usage_prompt_cache_read_tokens"]["max"] <= 1056
    assert report["usage_prompt_cache_read_tokens"]["min"] == 0
    served.until_idle()


def documented(told: str) -> list[str]:
    """The words of the page's one command in which this is told."""
    page = (ROOT / "docs" / "load.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if told in block]
    return shlex.split(found.replace("\\\n", " "))


def reported(words: Sequence[str], environment: Mapping[str, str], folder: Path) -> Any:
    """What aiperf writes of a run; skips where it is not installed."""
    if not (ROOT / AIPERF).is_file():
        pytest.skip(f"{AIPERF} is not there: `make loadgen` installs it")
    done = subprocess.run(
        [ROOT / AIPERF, *words, "--artifact-dir", folder / "report"],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads((folder / "report" / "profile_export_aiperf.json").read_text())
