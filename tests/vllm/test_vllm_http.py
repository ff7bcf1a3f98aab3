"""`vllm serve` with the connector, by the documentation's command, as its clients see it."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")
if not any(point.name == "forebay" for point in entry_points(group="vllm.general_plugins")):
    pytest.skip("Forebay is not installed here: `make vllm` does it", allow_module_level=True)

from byte_tokens import byte_tokenizer
from vllm_server import VllmServer, commands, documented, environment, shell, until, vllm

from forebay.core.ledger import MissReason
from forebay.vllm.seen.measures import FAMILIES, Kind

pytestmark = pytest.mark.timeout(240)
BLOCK = 32
OUTCOMES = {"used", "late", "wasted", "cancelled", "refused", "failed"}
SHOWN = [
    f"forebay:{name}"
    for name in ("prompt_tokens", "prefetch_bytes", "misses", "saved_bytes", "loaded_bytes")
]
ROOT = Path(__file__).resolve().parents[2]
LOADGEN = Path(os.environ.get("LOADGEN", ".venv-loadgen"), "bin")
TEMPLATE = "{% for each in messages %}{{ each['content'] }}\n{% endfor %}"
# The documented numbers but for the model's size: a fortieth of the tokens, half of the contexts.
BENCH = {
    "--prefix-repetition-num-prefixes": "12",
    "--prefix-repetition-prefix-len": "300",
    "--prefix-repetition-suffix-len": "32",
    "--prefix-repetition-output-len": "8",
    "--num-prompts": "12",
    "--max-concurrency": "12",
}
AIPERF = {
    "--conversation-num": "12",
    "--request-count": "36",
    "--concurrency": "12",
    "--synthetic-input-tokens-mean": "100",
    "--output-tokens-mean": "8",
}
HOST = ("forebay:prompt_tokens_total", "host")


def documented_load(beginning: str, told: dict[str, str]) -> list[str]:
    """The words of the documentation's command that begins so, with `told` behind its options."""
    words = commands(beginning)
    for name, value in told.items():
        words[words.index(name) + 1] = value
    return words


def text(seed: int, letters: int = 200) -> str:
    """A prompt of so many tokens, which is the same for the same `seed`."""
    dice = random.Random(seed)
    return "".join(dice.choice("abcdefghij klmnop") for _ in range(letters))


@pytest.fixture(scope="module")
def mode_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("switch") / "mode"


@pytest.fixture(scope="module")
def server(
    tiny_llama: Path,
    mode_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[VllmServer]:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tiny_llama)
    command = documented(tiny_llama, host_bytes="64MiB", mode_file=str(mode_file), hint_share=0.5)
    server = VllmServer(command, tmp_path_factory.mktemp("serve"))
    yield server
    server.kill()


def host_tokens(server: VllmServer, least: float) -> float:
    """Tokens that came from host memory so far, once they are at least so many."""
    until(lambda: server.value(*HOST) >= least)
    return server.value(*HOST)


def test_a_prompt_comes_back_from_host_memory(server: VllmServer):
    before, hits = server.value(*HOST), server.value("vllm:prefix_cache_hits_total")
    first = server.ask(text(1))
    server.reset()
    again = server.ask(text(1))
    assert again.choices[0].text == first.choices[0].text
    assert host_tokens(server, before + 192) == before + 192
    assert server.value("vllm:prefix_cache_hits_total") == hits + 192


def test_the_log_says_how_large_it_is(server: VllmServer):
    sizes = r"INFO .*\] Forebay \S+ in mode b4: host memory for [\d,]+ tokens \(64 MiB\)"
    assert len(re.findall(sizes, server.log())) == 1


def test_a_request_keeps_out_of_it(server: VllmServer):
    saved, before = server.value("forebay:saved_bytes_total"), server.value(*HOST)
    hidden = server.ask(text(2), no_save=True)
    server.ask(text(3))
    until(lambda: server.value("forebay:saved_bytes_total") > saved)
    server.reset()
    assert server.ask(text(2)).choices[0].text == hidden.choices[0].text
    server.reset()
    server.ask(text(3), no_cache=True)
    server.reset()
    server.ask(text(3))
    assert host_tokens(server, before + 192) == before + 192


def test_a_hint_brings_what_its_session_finds(server: VllmServer):
    server.ask(text(4))
    server.reset()
    claimed = server.value("forebay:hints_total", "claimed")
    word = server.ask(text(4), 1, hint={"eta_s": 30.0, "expiry_s": 20.0})
    told = word.kv_transfer_params["forebay"]
    assert told == {"hint": {"found_tokens": 192, "expiry_s": 20.0}}
    used = server.value("forebay:prefetch_bytes_total", "used")
    server.ask(text(4) + " and so on")
    until(lambda: server.value("forebay:hints_total", "claimed") == claimed + 1)
    assert server.value("forebay:prefetch_bytes_total", "used") > used


def test_the_documented_hint_is_taken_up(server: VllmServer):
    words = commands("curl --fail-with-body -s http://127.0.0.1:8000/v1/completions")
    asked = json.loads(words[words.index("-d") + 1])
    assert asked["max_tokens"] == 1
    answer = server.client.completions.create(
        model=server.model,
        prompt=text(40),
        max_tokens=1,
        extra_body={"kv_transfer_params": asked["kv_transfer_params"]},
    )
    assert set(answer.kv_transfer_params["forebay"]["hint"]) == {"found_tokens", "expiry_s"}


def test_what_is_not_understood_is_named_and_the_answer_given(server: VllmServer):
    answer = server.ask(text(5), no_cache="yes", speed=11)
    assert set(answer.kv_transfer_params["forebay"]["ignored"]) == {"no_cache", "speed"}
    assert answer.usage.completion_tokens == 8
    until(lambda: server.value("forebay:wishes_ignored_total", "unknown") >= 1)


def test_a_backlog_is_prefetched_and_answered_as_before(server: VllmServer):
    """Two run at a time, twelve wait; some leave in the middle of their answer."""
    prompts = [text(seed) for seed in range(10, 22)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        alone = [each.choices[0].text for each in pool.map(server.ask, prompts)]
        server.reset()
        used, before = server.value("forebay:prefetch_bytes_total", "used"), server.value(*HOST)
        leaving = [pool.submit(leave, server, prompt) for prompt in prompts[:3]]
        again = [each.choices[0].text for each in pool.map(server.ask, prompts)]
    assert [each.result() for each in leaving] == ["left"] * 3
    assert again == alone
    host_tokens(server, before + 192 * 9)
    assert server.value("forebay:prefetch_bytes_total", "used") > used


def leave(server: VllmServer, prompt: str) -> str:
    """Close the connection at the first token."""
    with server.client.completions.create(
        model=server.model, prompt=prompt, max_tokens=200, stream=True
    ) as stream:
        for _ in stream:
            return "left"
    return "nothing came"


def test_metrics_are_those_that_are_documented(server: VllmServer):
    server.ask(text(6))
    families = server.families()
    values = server.metrics()
    assert set(values["forebay:prefetch_bytes_total"]) == OUTCOMES
    assert set(values["forebay:misses_total"]) == {reason.value for reason in MissReason}
    assert values["forebay:misses_total"]["absent"] > 0
    ours = {name for name in families if name.startswith("forebay:")}
    # When each series began: prometheus_client's.
    ours = {name for name in ours if not name.endswith("_created")}
    assert ours == {family.name for family in FAMILIES}
    kinds = {family.name: family.kind.value for family in FAMILIES}
    assert {name: families[name].type for name in ours} == kinds
    counted = [family.name for family in FAMILIES if family.kind is Kind.COUNTER]
    assert all(value >= 0 for name in counted for value in values[f"{name}_total"].values())


def test_the_documented_look_at_metrics_shows_them(server: VllmServer):
    words = commands("curl --fail-with-body -s http://127.0.0.1:8000/metrics")
    pattern = words[words.index("-E") + 1]
    text = "".join(f"{name}_total\n" for name in SHOWN)
    shown = [line for line in text.splitlines() if re.match(pattern, line)]
    assert len(shown) == len(SHOWN) == len(pattern.split("|"))
    assert set(shown) <= set(server.metrics())


def test_a_second_turn_comes_from_host_memory_as_documented(server: VllmServer):
    block = shell("for turn in 1 2; do")
    for told, ours in {
        "{1..80}": "{1..12}",
        "user in 1 2 3 4;": "user in {1..8};",
        "smollm2": server.model,
        "http://127.0.0.1:8000": server.url,
    }.items():
        assert told in block
        block = block.replace(told, ours)
    before = server.value(*HOST)
    done = subprocess.run(
        ["bash", "-euc", block], capture_output=True, text=True, check=False, timeout=120
    )
    assert len(re.findall(r"turn [12], user [1-8]: [\d.]+ s\n", done.stdout)) == 16, done.stderr
    server.ask("on")
    # Fourteen whole blocks in each; the pool holds four such prompts.
    host_tokens(server, before + 4 * 14 * BLOCK)


def test_vllms_load_generator_runs_as_documented(server: VllmServer):
    """Twice, as the page says: what the first run pushed out the second finds in host memory."""
    words = documented_load(
        "vllm bench serve", {**BENCH, "--model": server.model, "--base-url": server.url}
    )
    load(words)
    server.ask("on")
    before = server.value(*HOST)
    report = load(words)
    assert re.search(r"P90 TTFT \(ms\): +[\d.]+ *\n", report), report[-3000:]
    # Ten whole blocks in each; the pool holds six contexts.
    host_tokens(server, before + 6 * 10 * BLOCK)


def load(words: list[str]) -> str:
    """What vLLM's load generator prints of a run in which every request is answered."""
    done = subprocess.run(
        vllm(*words[1:]),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"Successful requests: +12 *\n", done.stdout), done.stdout[-3000:]
    assert re.search(r"Failed requests: +0 *\n", done.stdout)
    return done.stdout


def test_a_load_generator_of_others_runs_as_documented(server: VllmServer, tmp_path: Path):
    """Users who come back find their conversations in host memory, and its report says so."""
    if not (ROOT / LOADGEN / "aiperf").is_file():
        pytest.skip(f"{LOADGEN} is not there: `make loadgen` installs it")
    # A model with random weights may say bytes that are no text, and aiperf wants text.
    letters = byte_tokenizer()("abcdefghij klmnop").input_ids
    asked = json.dumps({"ignore_eos": True, "allowed_token_ids": letters})
    told = {**AIPERF, "--model": server.model, "--tokenizer": server.model, "--url": server.url}
    told["--extra-inputs"] = asked
    words = documented_load(".venv-loadgen/bin/aiperf", told)
    before = server.value(*HOST)
    done = subprocess.run(
        [ROOT / LOADGEN / "aiperf", *words[1:], "--artifact-dir", tmp_path],
        # A path is no path to it while the hub's client is offline.
        env={k: v for k, v in os.environ.items() if not k.startswith(("HF_HUB_", "PYTHON"))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert report["error_summary"] == []
    assert report["request_count"]["avg"] == 36
    assert report["usage_prompt_cache_read_tokens"]["max"] >= 192
    host_tokens(server, before + 1)


def test_the_off_switch_acts_while_it_serves(server: VllmServer, mode_file: Path):
    said = server.ask(text(7)).choices[0].text
    server.reset()
    words = commands("echo b0")
    assert words[2:] == [">", "/run/forebay/mode"]
    mode_file.write_text(f"{words[1]}\n")
    try:
        until(lambda: bool(server.ask("on")) and server.value("forebay:mode", "b0") == 1)
        saved, before = server.value("forebay:saved_bytes_total"), server.value(*HOST)
        assert server.ask(text(7)).choices[0].text == said
        server.ask(text(8))
        server.reset()
    finally:
        mode_file.unlink()
    until(lambda: bool(server.ask("on")) and server.value("forebay:mode", "b4") == 1)
    assert server.value("forebay:saved_bytes_total") == saved
    assert server.value(*HOST) == before
    assert server.ask(text(7)).choices[0].text == said
    assert host_tokens(server, before + 192) == before + 192


def test_a_pause_for_new_weights_forgets_what_was_saved(server: VllmServer):
    """In the middle of a backlog that loads: what vLLM aborts then is answered so."""
    prompts = [text(seed) for seed in range(30, 38)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        said = [each.choices[0].text for each in pool.map(server.ask, prompts)]
        server.reset()
        cut = [pool.submit(server.ask, prompt, 300) for prompt in prompts]
        # Somewhere in the middle: what is told of the queue may be too old to wait for.
        time.sleep(0.3)
        assert server.post("/pause")["status"] == "paused"
        assert server.post("/resume")["status"] == "resumed"
        # Those that came too late for the abort are answered.
        assert {each.result().choices[0].finish_reason for each in cut} <= {"abort", "length"}
        # What was counted last is told with a step.
        server.ask("on")
        before = server.value(*HOST)
        assert [each.choices[0].text for each in pool.map(server.ask, prompts)] == said
    server.ask("on")
    assert server.value(*HOST) == before


def test_it_ends_when_asked_and_leaves_nothing(server: VllmServer):
    assert len(server.processes()) > 1, "the engine has no process of its own"
    server.ask(text(9))
    shared = server.shared()
    assert server.end() == 0, server.log()[-3000:]
    until(lambda: not server.processes())
    assert not [file for file in shared if file.exists()]
    # vLLM kills its engine at once, and its server may call that an error.
    broken = [line for line in server.log().splitlines() if "Traceback" in line]
    assert not [line for line in broken if "[async_llm.py" not in line]
