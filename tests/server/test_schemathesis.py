"""Whatever the description allows, and what it forbids, gets the answer that it promises.

All checks of Schemathesis: statuses, content types and bodies as described, what does not fit the
schema refused, keys asked for, methods that are not there, no fault of the server.
"""

from __future__ import annotations

import collections
import os
import subprocess
import sys
from pathlib import Path

import pytest
from server_rig import serving, tiny_model, until

from forebay.engine.settings import EngineSettings
from forebay.server.settings import ApiKey, ServerSettings

# More for a search by hand. The same seed makes the same examples.
EXAMPLES = os.environ.get("FOREBAY_SCHEMA_EXAMPLES", "8")
CONFIG = """
# Any client may send headers that nobody knows.
generation.allow-extra-parameters = false

[checks.positive_data_acceptance]
# What the schema cannot say: see schema_hooks.py.
expected-statuses = [200, 400, 404]
"""


def run(served, tmp_path, *options):
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    return subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli"),
            *("--config-file", str(tmp_path / "schemathesis.toml")),
            *("run", f"{served.url}/openapi.json", "--checks", "all", "--mode", "all"),
            *("--seed", "1"),
            *("--generation-database", "none", "--request-timeout", "30", "--no-color", *options),
        ],
        cwd=tmp_path,
        env=os.environ
        | {"SCHEMATHESIS_HOOKS": "schema_hooks", "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def statuses(monkeypatch):
    """How often each status was answered."""
    counted = collections.Counter()
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle  # noqa: PLC0415

    send = RequestResponseCycle.send

    async def spy(self, message):
        if message["type"] == "http.response.start":
            counted[message["status"]] += 1
        await send(self, message)

    monkeypatch.setattr(RequestResponseCycle, "send", spy)
    return counted


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("key", "phases", "examples"),
    [(None, "examples,coverage,fuzzing", EXAMPLES), ("secret", "fuzzing", "3")],
)
def test_answers_are_as_described(key, phases, examples, statuses, tmp_path):
    engine = EngineSettings(device_tokens=1024, host_bytes=1 << 22, block_tokens=16)
    keys = () if key is None else (ApiKey(key),)
    settings = ServerSettings(port=0, api_keys=keys, operator_key=key)
    with serving(tiny_model(96), settings, engine) as served:
        options = ["--phases", phases, "--max-examples", examples]
        if key is not None:
            options += ["--header", f"Authorization: Bearer {key}"]
        done = run(served, tmp_path, *options)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        until(lambda: served.server.front._open == 0)
        served.until_idle()
    # It asked in earnest: requests were answered as well as refused.
    assert statuses[200] > 3
    assert statuses[400] > 3
    assert (statuses[401] > 0) == (key is not None)
    assert not any(status >= 500 for status in statuses)
