"""The command line: what it prints, and how it ends."""

from __future__ import annotations

import gc
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).resolve().parent / "demo"))

from talker import save_talker, talker_model, talker_tokenizer

from forebay.cli import app
from forebay.cli.chat import Chat, at_terminal
from forebay.cli.values import parse_mode, parse_modes
from forebay.core.modes import Mode
from forebay.engine.engine import Engine
from forebay.engine.models import adopt_model
from forebay.engine.sampler import SamplingParams
from forebay.engine.settings import EngineSettings
from forebay.errors import SettingsError
from forebay.machine.sizes import parse_size
from forebay.server.run import reserved
from forebay.server.settings import ServerSettings
from forebay.transfer.pinned import cuda_devices


def cuda_is_here() -> bool:
    try:
        return bool(cuda_devices())
    except SettingsError:
        return False


NO_GPU = "there is no cuda:99: this process sees" if cuda_is_here() else "no NVIDIA driver"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_talker(tmp_path_factory.mktemp("talker"))


@pytest.fixture
def engine() -> Iterator[Engine]:
    loaded = adopt_model(talker_model(), talker_tokenizer(), name="talker")
    with Engine(loaded, EngineSettings(device_tokens=1024, host_bytes=4 << 20)) as made:
        yield made


def run(*arguments: object, lines: str = "") -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments], input=lines)


def test_version_and_help():
    assert run("--version").output.startswith("forebay")
    shown = run("--help").output
    assert "demo" in shown
    assert "chat" in shown


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("1GiB", 1 << 30), ("1.5 kib", 1536), ("2GB", 2 * 10**9), ("7b", 7)],
)
def test_sizes(text: str, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1 GiX", "-1GiB", "1,5GiB", "9" * 400])
def test_what_is_no_size(text: str):
    with pytest.raises(SettingsError, match="write it like"):
        parse_size(text)


def test_modes():
    assert parse_modes("b4, B0") == [Mode.LOOK_AHEAD, Mode.RECOMPUTE]
    for wrong, said in (("", "at least one"), ("b0,b0", "each once"), ("b9", "must be one of b0")):
        with pytest.raises(SettingsError, match=said):
            parse_modes(wrong)
    with pytest.raises(SettingsError, match="not available"):
        parse_mode("b5")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("demo", "--modes", "b0,b2"), "not available"),
        (("demo", "--out", "/dev/null/out"), "/dev/null/out cannot be made"),
        (("demo", "--load-advantage", "0"), "load_advantage must be positive"),
        (("demo", "--model", "/no/such/folder"), "/no/such/folder"),
        (("chat", "--model", "/no/such/folder"), "/no/such/folder"),
        (("chat", "--host-bytes", "much"), "no size"),
        (("chat", "--temperature", "-1"), "temperature"),
        (("chat", "--device", "gpu"), "must be auto, cpu, cuda or cuda:N"),
        (("chat", "--device", "cuda:99"), NO_GPU),
        (("serve", "--device", "cuda:99"), NO_GPU),
        (("demo", "--device", "cuda:99"), NO_GPU),
        (("serve", "--block-tokens", "0"), "block_tokens is 0, and must be a whole number"),
        (("serve", "--window-bytes", "large"), "'large' is no size"),
        (
            ("serve", "--mode", "b7"),
            "one of b0 (recompute), b1 (synchronous), b3 (asynchronous), b4",
        ),
        (("serve", "--port", "70000"), "port is 70000, and must be at most 65535"),
        (("serve", "--drain-s", "nan"), "drain_s is nan"),
        (("serve", "--log-level", "loud"), "debug, info, warning or error"),
        (("serve", "--port", "0", "--model", ""), "no model is named"),
        (("serve", "--port", "0", "--device-tokens", "10"), "64 or more would work\n"),
        (("serve", "--dtype", "int8"), "dtype is 'int8', and must be one of auto, bfloat16"),
    ],
)
def test_what_a_user_can_put_right_is_one_line(arguments: tuple[str, ...], said: str):
    done = run(*arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")


def test_a_package_that_is_not_installed_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "forebay.cli.serve", raising=False)
    monkeypatch.delitem(sys.modules, "forebay.server.run")
    monkeypatch.delattr("forebay.server.run")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done = run("serve", "--port", "0", "--model", "/no/such/folder")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: uvicorn is not installed: pip install '.[server]'")
    assert done.stderr.count("\n") == 1


def test_an_address_that_is_taken_is_told_before_a_model_is_looked_for():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run("serve", "--port", taken.getsockname()[1], "--model", "/no/such/folder")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: cannot listen on 127.0.0.1:")
    assert "Address already in use" in done.stderr


def test_nobody_is_let_in_at_a_reserved_address():
    with (
        reserved(ServerSettings(port=0)) as place,
        socket.socket() as client,
        pytest.raises(ConnectionRefusedError),
    ):
        client.connect(place.getsockname())


def test_the_demonstration_gets_what_was_asked_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[Any] = []

    def demonstrate(*arguments: Any) -> int:
        seen.extend(arguments)
        return 1

    monkeypatch.setattr("forebay.cli.demo.demonstrate", demonstrate)
    done = run("demo", "--model", folder, "--out", tmp_path, "--modes", "b1,b4",
               "--device-tokens", 512, "--answer-tokens", 3, "--load-advantage", 2)  # fmt: skip
    assert done.exit_code == 1
    _, workload, modes, out, settings, _ = seen
    assert len(workload.conversations) == 6
    assert modes == [Mode.SYNCHRONOUS, Mode.LOOK_AHEAD]
    assert out == tmp_path
    assert (settings.device_tokens, settings.answer_tokens) == (512, 3)
    assert settings.load_advantage == 2.0


def test_chat_by_lines(folder: Path):
    chat = ("chat", "--model", folder, "--max-tokens", 5, "--system", "You are brief. " * 5)
    lines = "hello\n\nand you?\n/stats\n/reset\n/what\n/exit\nnever read\n"
    done = run(*chat, lines=lines)
    assert done.exit_code == 0, done.stderr
    startup, _, said = done.stdout.partition("\n")
    assert "mode b4" in startup
    assert said.count(" [cut]\n") == 2
    found = re.search(r"whole blocks: (\d+) device", said)
    assert found is not None
    assert int(found[1]) > 0
    assert "unknown command /what" in said
    assert run(*chat, lines=lines).stdout.partition("\n")[2] == said


def test_a_chat_keeps_nothing_out_of_collections_when_it_is_over(folder: Path):
    chat = ("chat", "--model", folder, "--max-tokens", 2)
    assert run(*chat, lines="hello\n").exit_code == 0
    assert run(*chat, lines="word " * 300 + "\n").exit_code == 2
    assert gc.get_freeze_count() == 0


def test_a_message_that_does_not_fit_ends_a_piped_chat(folder: Path):
    done = run("chat", "--model", folder, lines="word " * 300 + "\n")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: a prompt of")
    assert "Traceback" not in done.output


def test_a_warning_is_one_line(folder: Path):
    done = run("chat", "--model", folder, "--host-bytes", "1MiB", "--max-tokens", 2, lines="hi\n")
    assert done.exit_code == 0
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("warning: the host tier")


def test_a_terminal_goes_on_after_a_message_that_does_not_fit(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    answers = iter(["hi", "word " * 300, "again"])

    def ask(_: str) -> str:
        try:
            return next(answers)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", ask)
    chat = Chat(engine, SamplingParams(max_tokens=4), "")
    at_terminal(chat)
    captured = capsys.readouterr()
    assert "/reset forgets" in captured.err
    assert captured.out.count(" [cut]\n") == 2
    assert not engine.busy


def test_an_interrupt_cuts_the_answer_and_keeps_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    step, steps = engine.step, 0

    def interrupted_step() -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(engine, "step", interrupted_step)
    chat = Chat(engine, SamplingParams(max_tokens=100, ignore_eos=True), "")
    before = signal.getsignal(signal.SIGINT)
    assert chat.take("hi")
    assert capsys.readouterr().out.endswith(" [cut]\n")
    assert steps == 3
    assert not engine.busy
    assert chat.take("go on")
    assert signal.getsignal(signal.SIGINT) is before
