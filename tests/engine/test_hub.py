"""Models by hub id: fetched once, used offline, refused with a reason. No network but loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from fake_hub import COMMIT, fake_hub

from forebay.engine.hub import is_hub_id

# What the client of the hub reads from the environment, it reads when it is imported.
PROGRAM = """
import json, sys
from forebay.engine.hub import hub_folder
from forebay.errors import ModelError
told = []
for name in json.loads(sys.argv[1]):
    try:
        told.append([str(hub_folder(name)), ""])
    except ModelError as error:
        told.append(["", str(error)])
print(json.dumps(told))
"""

WHOLE = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"",
    "model.safetensors": b"weights",
    "consolidated.safetensors": b"the same weights again",
    "pytorch_model.bin": b"a pickle",
    "modeling_it.py": b"code",
    "onnx/model.json": b"{}",
    "README.md": b"#",
}
MODELS = {
    "good/whole": WHOLE,
    "bad/pickled": {"config.json": b"{}", "pytorch_model.bin": b"a pickle"},
}


@pytest.fixture(scope="module")
def hub():
    with fake_hub(MODELS, {"bad/gated"}) as hub:
        yield hub


def ask(home, names, **environment):
    """For each name its folder, or what was wrong; by a process of its own."""
    env = os.environ | {"HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    env |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"} | environment
    env.pop("HF_HUB_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(names)],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_a_model_is_fetched_once_without_code_and_pickles_and_then_used_offline(hub, tmp_path):
    names = ["good/whole", f"good/whole@{COMMIT}"]
    (folder, error), (same, _) = ask(tmp_path, names, HF_ENDPOINT=hub.url)
    assert error == ""
    assert folder == same
    kept = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
    assert set(os.listdir(folder)) == kept
    asked = len(hub.asked)
    offline = ask(tmp_path, names[:1], HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
    unreachable = ask(tmp_path, names[:1], HF_ENDPOINT="http://127.0.0.1:9")
    assert offline == unreachable == [[folder, ""]]
    assert len(hub.asked) == asked


def test_what_cannot_be_had_is_told(hub, tmp_path):
    told = ask(
        tmp_path,
        ["none/none", "bad/gated", "bad/pickled", "good/whole@no-such", "a--b/c"],
        HF_ENDPOINT=hub.url,
    )
    expected = ["neither a folder", "gated", "no safetensors", "no revision", "no name"]
    for (folder, error), part in zip(told, expected, strict=True):
        assert folder == ""
        assert part in error
        assert "\n" not in error
    assert "HF_TOKEN" in told[1][1]


def test_without_a_network_the_way_out_is_told(tmp_path):
    ((_, offline),) = ask(tmp_path, ["good/whole"], HF_HUB_OFFLINE="1")
    ((_, unreachable),) = ask(tmp_path, ["good/whole"], HF_ENDPOINT="http://127.0.0.1:9")
    assert "HF_HUB_OFFLINE" in offline
    assert "network" in unreachable


def test_a_download_that_was_cut_off_is_told(hub, tmp_path):
    ((folder, _),) = ask(tmp_path, ["good/whole"], HF_ENDPOINT=hub.url)
    os.remove(os.path.join(folder, "model.safetensors"))
    ((_, error),) = ask(tmp_path, ["good/whole"], HF_HUB_OFFLINE="1")
    assert "incomplete" in error


@pytest.mark.parametrize("name", ["gpt2", "owner/name", "owner/name-1.0_b@v1.0", "a/b@refs/pr/1"])
def test_names_that_the_hub_may_have(name):
    assert is_hub_id(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "./name",
        "../name",
        "/name",
        "~/name",
        "a/b/c",
        "a\\b",
        "a/b\n",
        "a/b@",
        "a/b@../c",
        "http://a/b",
        "a b/c",
        "ä/b",
        "a/b?c",
        "a" * 200,
    ],
)
def test_names_that_it_cannot_have(name):
    assert not is_hub_id(name)
