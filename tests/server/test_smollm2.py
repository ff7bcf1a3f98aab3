"""`forebay serve` with the small real model, as a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import openai
import pytest

COMMAND = "from forebay.cli import main; import sys; sys.argv = ['forebay', *sys.argv[1:]]; main()"
OPTIONS = ["--port", "0", "--host-bytes", "256MiB", "--device-tokens", "2048"]


@pytest.fixture(scope="module")
def command():
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "serve", *OPTIONS],
        stdout=subprocess.PIPE,
        text=True,
    )
    url = ""
    for line in process.stdout:
        found = re.search(r"serving on (\S+),", line)
        if found:
            url = found[1]
            break
    yield openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60.0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) in (0, -signal.SIGTERM)


def test_a_conversation_makes_sense_and_is_cached(command):
    messages = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
    options = {"model": "smollm2", "max_tokens": 12, "temperature": 0}
    stream = command.chat.completions.create(
        **options, messages=messages, stream=True, stream_options={"include_usage": True}
    )
    events = list(stream)
    text = "".join(choice.delta.content or "" for event in events for choice in event.choices)
    assert "Paris" in text
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And Spain?"}]
    answer = command.chat.completions.create(**options, messages=messages)
    assert answer.usage.prompt_tokens_details.cached_tokens > 0


def test_a_template_without_tools_says_so(command):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(openai.BadRequestError, match="no tools"):
        command.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "a"}], tools=[tool]
        )
