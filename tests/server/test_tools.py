"""Tool calls: found in text however it is cut, and through the `openai` client."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.engine.request import FinishReason
from forebay.server.tools import ToolCallParser

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
    }
]


def parsed(pieces):
    parser = ToolCallParser()
    parts = [parser.push(piece) for piece in pieces] + [parser.finish()]
    return "".join(text for text, _ in parts), [call for _, calls in parts for call in calls]


@settings(deadline=None)
@given(st.lists(st.integers(0, 200), max_size=12))
def test_however_a_text_is_cut_its_calls_are_the_same(cuts):
    text = f"Let me <look>.{CALL} and {CALL}<tool"
    places = sorted({0, len(text), *(cut % len(text) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    shown, calls = parsed(pieces)
    assert shown == "Let me <look>. and <tool"
    assert [call.name for call in calls] == ["weather", "weather"]
    assert json.loads(calls[0].arguments) == {"city": "Köln"}
    assert calls[0].id != calls[1].id


@pytest.mark.parametrize("inside", ["no json", "[1]", '{"nom": 1}', "[" * 50_000])
def test_what_is_no_call_stays_text(inside):
    text = f"a<tool_call>{inside}</tool_call>b"
    assert parsed([text]) == (text, [])


def test_a_call_that_lacks_its_end_counts_if_it_is_whole():
    shown, calls = parsed(['<tool_call>{"name": "f", "arguments": {}}'])
    assert (shown, [call.name for call in calls]) == ("", ["f"])
    assert parsed(['<tool_call>{"name": "f"']) == ('<tool_call>{"name": "f"', [])


@pytest.fixture
def says(served):
    """Make the model say a text: its answers' pieces are replaced on their way."""
    engine, step = served.engine, served.engine.step

    def say(text):
        def spoken():
            deltas = step()
            return [_speak(delta, text) for delta in deltas]

        engine.step = spoken

    yield say
    engine.step = step


def _speak(delta, text):
    if delta.finished is None:
        return replace(delta, text="")
    return replace(delta, text=text, finished=FinishReason.STOP)


def test_calls_reach_the_client_whole_and_streamed(served, says):
    says(f"Wait.{CALL}{CALL}")
    client = served.client()
    options = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": TOOLS,
        "max_tokens": 4,
    }
    message = client.chat.completions.create(**options).choices[0].message
    assert message.content == "Wait."
    assert [call.function.name for call in message.tool_calls] == ["weather", "weather"]
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Köln"}
    one = client.chat.completions.create(**options, parallel_tool_calls=False)
    assert len(one.choices[0].message.tool_calls) == 1
    with client.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion().choices[0]
    assert [call.function.name for call in final.message.tool_calls] == ["weather", "weather"]


def test_an_answer_to_a_call_goes_back_through_the_template(served):
    call = {"id": "c1", "type": "function"}
    call["function"] = {"name": "weather", "arguments": '{"city": "Ulm"}'}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Rain"},
    ]
    client = served.client()
    answer = client.chat.completions.create(
        model="tiny", messages=messages, tools=TOOLS, max_tokens=1
    )
    told = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    assert answer.usage.prompt_tokens > told.usage.prompt_tokens
    without = [messages[0], {"role": "assistant", "content": ""}, messages[2]]
    less = client.chat.completions.create(model="tiny", messages=without, max_tokens=1)
    assert told.usage.prompt_tokens - less.usage.prompt_tokens == len("[weather Ulm]")


def test_no_call_can_be_forced(served):
    with pytest.raises(openai.BadRequestError, match="forced"):
        served.client().chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "a"}],
            tools=TOOLS,
            tool_choice="required",
        )
