"""A load generator that people use, unmodified, against a server: `make loadgen` installs it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from server_rig import Served

from forebay.engine.models import LoadedModel

ROOT = Path(__file__).resolve().parents[2]
AIPERF = Path(os.environ.get("LOADGEN", ".venv-loadgen"), "bin", "aiperf")
CLIENTS, TURNS, ANSWER_TOKENS = 3, 2, 12


@pytest.mark.timeout(400)
def test_aiperf_finds_every_answer_whole(served: Served, tiny: LoadedModel, tmp_path: Path):
    if not (ROOT / AIPERF).is_file():
        pytest.skip(f"{AIPERF} is not there: `make loadgen` installs it")
    tiny.tokenizer.save_pretrained(tmp_path / "tokenizer")
    # A path is no path to it while the hub's client is offline.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_HUB_", "PYTHON"))}
    done = subprocess.run(
        [
            *(ROOT / AIPERF, "profile", "--ui", "none"),
            *("--model", "tiny", "--url", served.url, "--tokenizer", tmp_path / "tokenizer"),
            *("--endpoint-type", "chat", "--streaming", "--use-server-token-count"),
            *("--concurrency", str(CLIENTS), "--conversation-num", str(CLIENTS)),
            *("--conversation-turn-mean", str(TURNS), "--request-count", str(CLIENTS * TURNS)),
            *("--synthetic-input-tokens-mean", "100"),
            *("--output-tokens-mean", str(ANSWER_TOKENS), "--extra-inputs", "ignore_eos:true"),
            *("--artifact-dir", tmp_path / "report"),
        ],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    report = json.loads((tmp_path / "report" / "profile_export_aiperf.json").read_text())
    assert report["error_summary"] == []
    assert report["request_count"]["avg"] == CLIENTS * TURNS
    assert report["usage_completion_tokens"]["min"] == ANSWER_TOKENS
    assert report["usage_completion_tokens"]["max"] == ANSWER_TOKENS
    assert report["time_to_first_token"]["count"] == CLIENTS * TURNS
    # Only second turns repeat anything, and they repeat whole blocks.
    assert report["usage_prompt_cache_read_tokens"]["max"] >= 96
    served.until_idle()
