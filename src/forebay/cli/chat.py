"""`forebay chat`: one conversation with an engine, from a terminal or from lines of a pipe."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType

from forebay.cli.garbage import keep_out
from forebay.cli.told import tell_loading
from forebay.cli.values import parse_device, parse_dtype, parse_mode
from forebay.core.ledger import Source
from forebay.engine.engine import Engine
from forebay.engine.request import FinishReason
from forebay.engine.sampler import SamplingParams
from forebay.engine.settings import EngineSettings
from forebay.engine.text import chat_prompt
from forebay.errors import RequestError
from forebay.machine.sizes import parse_size

_PROMPT = "you> "
_COMMANDS = "/reset forgets the conversation, /stats says what the cache did, /exit ends"


def run_chat(
    model: str,
    mode: str,
    system: str,
    *,
    device: str,
    dtype: str,
    device_tokens: int,
    host_bytes: str,
    max_tokens: int,
    temperature: float,
    seed: int | None,
) -> None:
    """Chat until the input ends or /exit. Raises what `told` tells."""
    settings = EngineSettings(
        device=parse_device(device),
        dtype=parse_dtype(dtype),
        device_tokens=device_tokens,
        host_bytes=parse_size(host_bytes),
        mode=parse_mode(mode),
    )
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    tell_loading(model)
    with Engine(model, settings) as engine:
        keep_out()
        print(engine.startup_line)
        chat = Chat(engine, params, system)
        if sys.stdin.isatty():
            print(_COMMANDS)
            at_terminal(chat)
        else:
            for line in sys.stdin:
                if not chat.take(line.strip()):
                    break


def at_terminal(chat: Chat) -> None:
    """Ask for messages until the input ends or /exit. What does not fit is told and left out."""
    with suppress(ImportError):
        # Gives `input` line editing and history.
        import readline  # noqa: F401, PLC0415
    while True:
        try:
            if not chat.take(input(_PROMPT).strip()):
                return
        except RequestError as error:
            print(f"error: {error}\n/reset forgets the conversation", file=sys.stderr)
        except (EOFError, KeyboardInterrupt):
            print()
            return


@dataclass(slots=True)
class Chat:
    """One conversation, by its text: a message goes out with all that was said before it."""

    engine: Engine
    params: SamplingParams
    system: str
    _messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def __post_init__(self) -> None:
        self._reset()

    def take(self, line: str) -> bool:
        """Answer a message or obey a command; False once the chat is over.

        Raises RequestError for a message that does not fit; the conversation is as before then.
        """
        if line == "/exit":
            return False
        if line == "/reset":
            self._reset()
        elif line == "/stats":
            print(self._stats())
        elif line.startswith("/"):
            print(f"unknown command {line.split(maxsplit=1)[0]}; {_COMMANDS}")
        elif line:
            self._answer(line)
        return True

    def _answer(self, line: str) -> None:
        """Stream the answer. Ctrl-C ends it early; what came of it stays in the conversation."""
        messages = [*self._messages, {"role": "user", "content": line}]
        prompt = chat_prompt(self.engine.loaded.tokenizer, messages)
        request = self.engine.submit(prompt, self.params)
        with _interrupts() as interrupted:
            while request.finished is None:
                if interrupted:
                    self.engine.abort(request.id)
                    break
                for delta in self.engine.step():
                    print(delta.text, end="", flush=True)
        print(" [cut]" if request.finished is not FinishReason.STOP else "")
        if request.finished is FinishReason.FAILED:
            raise RequestError(request.error)
        self._messages = [*messages, {"role": "assistant", "content": request.text}]

    def _reset(self) -> None:
        self._messages = [{"role": "system", "content": self.system}] if self.system else []

    def _stats(self) -> str:
        stats, block = self.engine.cache.stats(), self.engine.pool.block_tokens
        sources = ", ".join(
            f"{stats.sources[source] * block:,} {source.value}"
            for source in (Source.DEVICE, Source.HOST, Source.RECOMPUTED)
        )
        return (
            f"prompt tokens in whole blocks: {sources}; loaded {stats.loaded_bytes / 1e6:,.1f} MB, "
            f"saved {stats.saved_bytes / 1e6:,.1f} MB; steps held back "
            f"{self.engine.stall_s:.2f} s of {stats.load_s:.2f} s of loading"
        )


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """While this lasts Ctrl-C only fills the list: a step that runs is never torn."""
    caught: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        caught.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, before)
