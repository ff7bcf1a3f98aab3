"""The `openai` package as it is, against the server."""

from __future__ import annotations

import asyncio

import openai
import pytest

LONG = "The quick brown fox jumps over the lazy dog. " * 4
USER = [{"role": "user", "content": "Hello"}]


def test_a_completion_says_what_it_used(served):
    answer = served.client().completions.create(
        model="tiny", prompt=LONG, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.object == "text_completion"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(LONG)
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == len(LONG) + 8
    sources = answer.usage.forebay["tokens_by_source"]
    assert sum(sources.values()) == len(LONG)


def test_the_same_prompt_is_found_in_the_cache(served):
    def ask():
        return served.client().completions.create(
            model="tiny", prompt=LONG, max_tokens=4, temperature=0
        )

    first, second = ask(), ask()
    assert second.choices[0].text == first.choices[0].text
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= len(LONG) // 16 * 16 - 16
    assert second.usage.forebay["tokens_by_source"]["device"] == cached


def test_streamed_and_whole_answers_are_the_same(served):
    client = served.client()
    options = {"model": "tiny", "messages": USER, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**options)
    events = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.delta.content or "" for e in events for c in e.choices)
    assert text == whole.choices[0].message.content
    assert events[0].choices[0].delta.role == "assistant"
    assert [c.finish_reason for e in events for c in e.choices][-1] in ("stop", "length")
    assert events[-1].choices == []
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({event.id for event in events}) == 1


def test_several_prompts_and_answers_keep_their_places(served):
    client = served.client()
    rows = [[72, 101, 108], [90, 91, 92]]
    both = client.completions.create(model="tiny", prompt=rows, n=2, max_tokens=5, seed=3)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.usage.prompt_tokens == 6
    alone = client.completions.create(model="tiny", prompt=rows[1], n=2, max_tokens=5, seed=3)
    assert [c.text for c in both.choices[2:]] == [c.text for c in alone.choices]
    assert alone.choices[0].text != alone.choices[1].text


def test_a_seed_repeats_an_answer(served):
    def ask(seed):
        answer = served.client().completions.create(
            model="tiny", prompt="abc", max_tokens=12, temperature=1.5, top_p=0.95, seed=seed
        )
        return answer.choices[0].text

    assert ask(-5) == ask(-5)
    assert ask(1) != ask(2)


def test_a_stop_string_ends_an_answer_and_is_not_in_it(served):
    client = served.client()
    options = {"model": "tiny", "prompt": "abc", "max_tokens": 40, "temperature": 0}
    text = client.completions.create(**options).choices[0].text
    stop = text[5:7]
    events = client.completions.create(**options, stop=[stop], stream=True)
    cut = [event.choices[0] for event in events]
    assert "".join(choice.text for choice in cut) == text[: text.index(stop)]
    assert cut[-1].finish_reason == "stop"


def test_logprobs_in_both_forms(served):
    client = served.client()
    plain = client.completions.create(model="tiny", prompt="abc", max_tokens=3, logprobs=2)
    logprobs = plain.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == plain.usage.completion_tokens
    assert all(value <= 0 for value in logprobs.token_logprobs)
    chat = client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=3, logprobs=True, top_logprobs=2
    )
    tokens = chat.choices[0].logprobs.content
    assert len(tokens) == chat.usage.completion_tokens
    assert all(len(token.top_logprobs) == 2 for token in tokens)


def test_the_async_client_streams_many_at_once(served):
    async def ask(client, user):
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": f"I am number {user}"}],
            max_tokens=10,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        return [event async for event in stream][-1].choices[0].finish_reason

    async def all_of_them():
        async with served.async_client() as client:
            return await asyncio.gather(*(ask(client, user) for user in range(16)))

    assert asyncio.run(all_of_them()) == ["length"] * 16


def test_turns_of_a_session_go_on_from_each_other(served):
    client = served.client()
    messages = [{"role": "user", "content": "Tell me of rivers. " * 8}]
    cached = []
    for _ in range(3):
        answer = client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=8,
            temperature=0,
            extra_body={"session": "rivers", "ignore_eos": True},
        )
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        messages.append({"role": "user", "content": "Go on, please."})
    assert cached[0] == 0 < cached[1] < cached[2]


def test_the_model_is_listed_and_another_is_not_found(served):
    client = served.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-4", prompt="a")
    assert caught.value.code == "model_not_found"


def test_what_is_too_long_or_not_carried_is_refused_with_a_reason(served):
    client = served.client()
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model="tiny", prompt=[5] * 2000, max_tokens=100)
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        client.completions.create(model="tiny", prompt="a", logit_bias={"999": 1})
    with pytest.raises(openai.BadRequestError, match="token ids"):
        client.completions.create(model="tiny", prompt=[5, 10_000])
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(
            model="tiny", messages=USER, response_format={"type": "json_object"}
        )
