"""`--device cuda`: what is served there, and what a wrong device is told."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from byte_tokens import byte_tokenizer
from oracle import compare_with_recompute, prompt
from tiny_models import build

from forebay.engine.engine import Engine
from forebay.engine.models import load_model
from forebay.engine.settings import EngineSettings
from forebay.errors import SettingsError
from forebay.timeline.record import Kind, Timeline
from forebay.transfer.pinned import cuda_devices
from forebay.tune.run import TuneSettings, tune
from forebay.tune.steps import StepSizes

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PATIENCE_S = 100.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("model")
    build("llama").save_pretrained(place)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(place)
    return place


def forebay(*words: object, lines: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "forebay", *map(str, words)],
        input=lines,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


def test_what_is_served_is_what_the_model_says(folder):
    """Twelve prompts in three turns over pools that evict, as clients of the server."""
    pytest.importorskip("fastapi", exc_type=ImportError)
    from forebay.server.run import Server  # noqa: PLC0415
    from forebay.server.settings import ServerSettings  # noqa: PLC0415

    settings = EngineSettings(
        device="cuda:0", dtype="float32", block_tokens=8, device_tokens=320, host_bytes=4 << 20
    )
    engine = Engine(folder, settings)
    assert engine.startup_line.startswith(f"cuda:0 ({cuda_devices()[0].name}), float32: device 320")
    requests, submit = [], engine.submit

    def noted(*words, **more):
        requests.append(submit(*words, **more))
        return requests[-1]

    engine.submit = noted
    server = Server(engine, ServerSettings(port=0))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end_s = time.monotonic() + PATIENCE_S
    while not server.started:
        assert time.monotonic() < end_s
        time.sleep(0.01)

    def ask(seed: int) -> dict:
        body = {"prompt": prompt(72, seed).tolist(), "max_tokens": 9, "ignore_eos": True}
        asked = urllib.request.Request(
            f"{server.url}/v1/completions",
            json.dumps(body | {"temperature": 0}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            return json.load(answer)

    try:
        with ThreadPoolExecutor(12) as users:
            for _ in range(3):
                answers = list(users.map(ask, range(12)))
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
    assert sorted(each["choices"][0]["text"] for each in answers) == sorted(
        request.text for request in requests[-12:]
    )
    agreement = compare_with_recompute(engine.loaded, requests)
    assert agreement.tokens == 36 * 9
    assert agreement.near_ties <= 3
    sources = [each["usage"]["forebay"]["tokens_by_source"] for each in answers]
    assert sum(each["host"] for each in sources) > 0


def test_chat_by_lines(folder):
    done = forebay("chat", "--model", folder, "--device", "cuda", "--max-tokens", 4, lines="hi\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"cuda:0 ({cuda_devices()[0].name}), bfloat16: device 8,192")


def test_auto_takes_the_gpu(folder):
    done = forebay("chat", "--model", folder, "--dtype", "float16", "--max-tokens", 2, lines="hi\n")
    assert done.stdout.startswith("cuda:0 ("), done.stderr
    assert "), float16: device" in done.stdout


@pytest.mark.parametrize("command", ["serve", "chat", "demo", "tune"])
def test_a_gpu_that_is_not_there_is_one_line(folder, command):
    if command in ("serve", "demo"):
        pytest.importorskip("fastapi", exc_type=ImportError)
    done = forebay(command, "--model", folder, "--device", "cuda:99")
    assert done.returncode == 2
    seen = cuda_devices()
    assert done.stderr.startswith("error: there is no cuda:99: this process sees cuda:0 (")
    assert done.stderr.count("cuda:") == 1 + len(seen)
    assert done.stderr.count("\n") == 1


def test_a_gpu_that_is_hidden_is_told_of_its_variable(folder, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = forebay("chat", "--model", folder, "--device", "cuda", lines="hi\n")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "CUDA_ERROR_NO_DEVICE" in done.stderr
    done = forebay("chat", "--model", folder, "--max-tokens", 2, lines="hi\n")
    assert done.stdout.startswith("cpu, float32: "), done.stderr


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device is here")
def test_everything_lies_on_the_second_of_two(folder):
    before = torch.cuda.mem_get_info(0)[0]
    settings = EngineSettings(device="cuda:1", dtype="float32", host_bytes=64 << 20)
    timeline = Timeline()
    with Engine(folder, settings, timeline=timeline) as engine:
        assert engine.startup_line.startswith("cuda:1 (")
        places = {tensor.device for tensor in engine.loaded.model.state_dict().values()}
        assert {*places, engine.pool.device} == {torch.device("cuda", 1)}
        requests = engine.generate([prompt(40, seed) for seed in range(6)])
        compare_with_recompute(engine.loaded, requests)
        assert engine.cache.stats().saved_bytes > 0
    assert Kind.PREFILL_STEP in {span.kind for span in timeline}
    assert before - torch.cuda.mem_get_info(0)[0] < 64 << 20


def test_tune_measures_all_that_a_gpu_has(folder):
    sizes = StepSizes(requests=2, context_tokens=64, prefill_tokens=64)
    settings = TuneSettings(sizes=sizes, foreign_samples=50, most_pool_bytes=64 << 20)
    found = tune(load_model(folder, device="cuda"), settings)
    assert not found.missing
    assert found.device.startswith("cuda:0 (")
    assert all(each.foreign_p99_s is not None for each in found.windows)
    assert len(found.fragments) == 9
    assert found.models[0].dtype == "bfloat16"


def test_a_host_pool_that_does_not_fit_says_what_there_is(folder):
    loaded = load_model(folder, device="cuda")
    with pytest.raises(SettingsError, match=r"a host pool of 512 TiB is pinned, and there are"):
        Engine(loaded, EngineSettings(host_bytes=512 << 40))


def test_a_model_larger_than_the_gpu_says_so(tmp_path):
    """Larger than what other tests left over of the memory that PyTorch holds, too."""
    build("llama", hidden_size=1024, intermediate_size=4096).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    torch.cuda.set_per_process_memory_fraction(1e-9)
    torch.cuda.empty_cache()
    try:
        with pytest.raises(SettingsError, match=r"takes .* in torch.bfloat16, and cuda:0"):
            load_model(tmp_path, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
