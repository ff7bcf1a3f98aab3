"""The demonstration in small: real engines, every mode, files."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from talker import small_talk

from forebay.core.ledger import Source
from forebay.core.modes import Mode
from forebay.demo import show
from forebay.demo.client import ask
from forebay.demo.report import judge
from forebay.demo.run import ModeResult, run_mode, throttled_link
from forebay.demo.settings import DemoSettings
from forebay.demo.show import demonstrate
from forebay.demo.workload import Script, Turn
from forebay.engine.models import LoadedModel
from forebay.errors import RequestError

# Two run at once, six want to, and less than three fit.
SMALL = DemoSettings(
    device_tokens=1536,
    host_tokens=8192,
    max_running=2,
    answer_tokens=8,
    stagger_s=0.0,
    pause_s=0.01,
)
MODES = (Mode.RECOMPUTE, Mode.SYNCHRONOUS, Mode.LOOK_AHEAD)


@pytest.fixture(scope="module")
def results(talker: LoadedModel) -> dict[Mode, ModeResult]:
    script = Script(small_talk())
    link, _ = throttled_link(talker, SMALL)
    return {mode: run_mode(talker, mode, script, SMALL, link) for mode in MODES}


def test_every_turn_is_answered_alike_in_every_mode(results: dict[Mode, ModeResult]):
    expected = {Turn(user, number) for user in range(6) for number in range(3)}
    for result in results.values():
        assert set(result.answers) == expected
        for turn, answer in result.answers.items():
            assert len(answer.tokens) == SMALL.answer_tokens_of(turn)
            assert 0 < answer.ttft_s < 60
    assert not judge(list(results.values())).errors


def test_modes_differ_in_where_tokens_come_from(results: dict[Mode, ModeResult]):
    def total(mode: Mode, source: Source) -> int:
        return sum(each.tokens_by_source.get(source, 0) for each in results[mode].answers.values())

    prompts = {mode: sum(total(mode, source) for source in Source) for mode in MODES}
    assert len(set(prompts.values())) == 1
    assert total(Mode.RECOMPUTE, Source.HOST) == 0
    assert total(Mode.SYNCHRONOUS, Source.HOST) > 0
    assert total(Mode.LOOK_AHEAD, Source.HOST) > 0
    assert total(Mode.RECOMPUTE, Source.RECOMPUTED) > total(Mode.LOOK_AHEAD, Source.RECOMPUTED)


def test_only_look_ahead_prefetches(results: dict[Mode, ModeResult]):
    assert results[Mode.LOOK_AHEAD].stats.prefetch_bytes["used"] > 0
    assert sum(results[Mode.SYNCHRONOUS].stats.prefetch_bytes.values()) == 0
    assert results[Mode.RECOMPUTE].hidden_share is None


def test_answers_differ_in_length_by_turn_and_not_by_mode():
    lengths = {SMALL.answer_tokens_of(Turn(user, 0)) for user in range(3)}
    assert lengths == {4, 8, 12}
    assert DemoSettings(answer_tokens=1).answer_tokens_of(Turn(0, 0)) == 1


def test_what_a_user_sees(talker: LoadedModel, tmp_path: Path):
    console = Console(width=120, force_terminal=False)
    with console.capture() as captured:
        demonstrate(talker, small_talk(), MODES, tmp_path / "new", SMALL, console)
    shown = captured.get()
    for words in (
        "is throttled to",
        "stands in for a GPU",
        "HTTP client",
        "ui.perfetto.dev",
        "mode b1; link",
        "18 of 18 answers",
        "Go by the rows of tokens, bytes and hidden share",
    ):
        assert words in shown
    assert shown.count("TTFT, s") == 1
    assert "same answers: all 3 modes" in shown
    trace = json.loads((tmp_path / "new" / "timeline-b4.json").read_text())
    kinds = {(event.get("cat"), event["name"]) for event in trace["traceEvents"]}
    assert ("copy", "prefetch") in kinds
    assert ("step", "decode only") in kinds
    assert (tmp_path / "new" / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_on_a_gpu_users_queue_however_fast_it_is(
    talker: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With pauses longer than a turn each would find its KV where it left it."""
    monkeypatch.setattr(show, "throttled_link", lambda *_: (0.0, 1e5))  # as a GPU's
    paused = replace(SMALL, stagger_s=0.3, pause_s=0.2)
    console = Console(width=120, force_terminal=False)
    with console.capture() as captured:
        demonstrate(talker, small_talk(), MODES, tmp_path, paused, console)
    shown = captured.get()
    assert "used no prefetched bytes" not in shown, shown
    assert "same answers: all 3 modes" in shown
    assert "Users come back as soon as they are answered" in shown


@pytest.mark.parametrize("modes", [(Mode.LOOK_AHEAD,), (Mode.ASYNCHRONOUS, Mode.RECOMPUTE)])
def test_other_choices_of_modes(talker: LoadedModel, tmp_path: Path, modes: Sequence[Mode]):
    console = Console(width=120, force_terminal=True)
    with console.capture() as captured:
        demonstrate(talker, small_talk(3, 2), modes, tmp_path, SMALL, console)
    assert "DIFFERENT" not in captured.get()


def test_the_timeline_names_the_users(results: dict[Mode, ModeResult]):
    rows = {span.row for span in results[Mode.LOOK_AHEAD].timeline if span.row}
    assert {f"user {user + 1}" for user in range(6)} <= rows


def test_a_prompt_that_cannot_fit_is_told_and_leaves_nobody_behind(talker: LoadedModel):
    script = Script(small_talk())
    with pytest.raises(RequestError, match="device pool"):
        run_mode(talker, Mode.RECOMPUTE, script, DemoSettings(device_tokens=64), 1e6)
    until_s = time.monotonic() + 20
    while any(t.name.startswith(("demo-", "forebay-")) for t in threading.enumerate()):
        assert time.monotonic() < until_s, threading.enumerate()
        time.sleep(0.02)


def test_a_model_that_cannot_chat_is_told(talker: LoadedModel):
    silent = replace(talker, tokenizer=copy.deepcopy(talker.tokenizer))
    silent.tokenizer.chat_template = None
    with pytest.raises(RequestError, match="no chat template"):
        run_mode(silent, Mode.RECOMPUTE, Script(small_talk()), SMALL, 1e6)


def test_a_server_that_is_not_there_is_an_error_not_an_answer():
    with pytest.raises(ConnectionRefusedError):
        ask(("127.0.0.1", 1), [{"role": "user", "content": "anybody?"}], 4, "")
