"""What requests may ask for: fields in bodies and headers are served as said, or refused."""

from __future__ import annotations

import json

import openai
import pytest
import raw
from server_rig import until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Hello"}]
PROMPT = "A prompt that is long enough for some blocks of the cache. " * 2


def ask(served, headers="", path=COMPLETIONS, **fields):
    """Status, and the answer or the error, of a small request with `fields` in its body."""
    prompt = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": USER}
    body = prompt | {"max_tokens": 1, "temperature": 0} | fields
    status, _, answer = raw.ask(served.port, path, body, headers=headers)
    answer = json.loads(answer)
    return status, answer.get("error", answer)


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


# -- headers -------------------------------------------------------------------------------------


def test_a_salt_in_a_header_is_the_salt_of_a_body(served):
    header = "X-Forebay-Cache-Salt: in a header\r\n"
    assert cached(ask(served, header)[1]) == 0
    assert cached(ask(served, header)[1]) > 0
    assert cached(ask(served, cache_salt="in a header")[1]) > 0
    assert cached(ask(served, header, cache_salt="in a header")[1]) > 0
    assert cached(ask(served, cache_salt="in a body")[1]) == 0


def test_no_cache_and_no_save_as_headers(served):
    salt = "x-forebay-cache-salt: on and off\r\n"
    assert cached(ask(served, salt + "x-forebay-no-save: TRUE\r\n")[1]) == 0
    assert cached(ask(served, salt)[1]) == 0
    assert cached(ask(served, salt + "x-forebay-no-cache: 1\r\n")[1]) == 0
    assert cached(ask(served, salt + "x-forebay-no-cache: false\r\n")[1]) > 0


def test_session_and_priority_reach_the_engine(served):
    seen = []
    submit = served.engine.submit

    def spy(*arguments, **options):
        seen.append(options)
        return submit(*arguments, **options)

    served.engine.submit = spy
    try:
        headers = "x-forebay-session: of a header\r\nx-forebay-priority: -7\r\n"
        for _ in range(2):
            assert ask(served, headers)[0] == 200
    finally:
        served.engine.submit = submit
    assert [options["priority"] for options in seen] == [-7, -7]
    assert seen[0]["follows"] is None
    assert seen[1]["follows"] is not None


def test_a_client_of_the_openai_package_can_set_headers(served):
    answer = served.client(default_headers={"X-Forebay-Cache-Salt": "a"}).completions.create(
        model="tiny", prompt=PROMPT, max_tokens=1, extra_headers={"X-Forebay-Priority": "3"}
    )
    assert answer.choices


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ("x-forebay-session: a\r\n", {"session": "b"}),
        ("x-forebay-no-cache: true\r\n", {"no_cache": False}),
        ("x-forebay-priority: 1\r\n", {"priority": 2}),
        ("x-forebay-cache-salt: a\r\n", {"cache_salt": ""}),
    ],
)
def test_a_header_and_a_body_that_differ_are_refused(served, headers, fields):
    status, error = ask(served, headers, **fields)
    assert (status, error["param"]) == (400, next(iter(fields)))
    assert "differs" in error["message"]
    assert ask(served, headers, **dict.fromkeys(fields))[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        "x-forebay-session: a\r\nx-forebay-session: a\r\n",
        "x-forebay-session: a\r\nX-FOREBAY-SESSION: b\r\n",
        "x-forebay-session:\r\n",
        "x-forebay-session:    \r\n",
        "x-forebay-session: a\tb\r\n",
        "x-forebay-session: a\x01b\r\n",
        "x-forebay-session: a\x7fb\r\n",
        "x-forebay-session: k\u00f6ln\r\n",
        f"x-forebay-session: {'a' * 257}\r\n",
        "x-forebay-cache-salt: a\r\n folded\r\n",
        "x-forebay-cache-salt: a\x00b\r\n",
        "x-forebay-no-cache: yes\r\n",
        "x-forebay-no-save: 2\r\n",
        "x-forebay-priority: 1001\r\n",
        "x-forebay-priority: 1.5\r\n",
        "x-forebay-priority: +1\r\n",
        "x-forebay-priority: 1e2\r\n",
        "x-forebay-priority: \u0661\r\n",
        f"x-forebay-priority: {'9' * 5000}\r\n",
        "x-forebay-sesion: a\r\n",
        "x-forebay-tenant: a\r\n",
    ],
)
def test_headers_that_cannot_be_are_refused(served, headers):
    status, _, answer = raw.ask(
        served.port, COMPLETIONS, {"prompt": "a", "max_tokens": 1}, headers=headers
    )
    assert status == 400, answer
    until(lambda: served.server.front._open == 0)


# -- fields --------------------------------------------------------------------------------------

REFUSED = {
    "add_generation_prompt": False,
    "allowed_token_ids": [1],
    "best_of": 2,
    "chat_template": "x",
    "continue_final_message": True,
    "documents": [{}],
    "echo": True,
    "include_stop_str_in_output": True,
    "kv_transfer_params": {},
    "length_penalty": 2.0,
    "logits_processors": ["x"],
    "lora_path": "x",
    "modalities": ["text", "audio"],
    "prompt_logprobs": 1,
    "reasoning_effort": "high",
    "regex": "a+",
    "response_format": {"type": "json_object"},
    "return_token_ids": True,
    "service_tier": "priority",
    "skip_special_tokens": False,
    "store": True,
    "structured_outputs": {"choice": ["a"]},
    "suffix": "b",
    "truncate_prompt_tokens": 5,
    "use_beam_search": True,
    "verbosity": "low",
    "web_search_options": {},
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("name", "value"), REFUSED.items(), ids=REFUSED)
def test_what_would_change_the_answer_and_is_not_carried_is_refused(served, path, name, value):
    status, error = ask(served, path=path, **{name: value})
    assert (status, error["param"], error["type"]) == (400, name, "invalid_request_error")
    assert name in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "fields",
    [
        dict.fromkeys(REFUSED),
        {"best_of": 1, "echo": False, "suffix": "", "logit_bias": {}, "length_penalty": 1.0},
        {"response_format": {"type": "text"}, "modalities": ["text"], "store": False},
        {"user": "somebody", "metadata": {"a": "b"}, "safety_identifier": "x"},
        {"service_tier": "auto", "reasoning_effort": "none", "verbosity": "medium"},
        {"stop": None, "n": None, "seed": None, "top_k": -1, "stop_token_ids": []},
    ],
)
def test_what_asks_for_nothing_is_taken(served, path, fields):
    status, answer = ask(served, path=path, **fields)
    assert status == 200, answer


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": 2.5},
        {"max_tokens": True},
        {"n": 0},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": [5]},
        {"stop": ["a"] * 65},
        {"stop": "a" * 1025},
        {"temperature": "warm"},
        {"temperature": 1e9},
        {"min_tokens": 2, "max_tokens": 1},
        {"min_tokens": -1},
        {"min_tokens": 1, "max_tokens": 2, "stop_token_ids": list(range(259))},
        {"logit_bias": {"5": 100.5}},
        {"logit_bias": {"5": -101}},
        {"logit_bias": {"5": "1"}},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {"05": 1}},
        {"logit_bias": {"259": 1}},
        {"logit_bias": {str(token): 1 for token in range(301)}},
        {"logit_bias": [[5, 1]]},
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        {"stream": "yes"},
        {"stream_options": {}},
        {"session": "s" * 257},
        {"priority": 1001},
        {"user": 5},
    ],
    ids=lambda fields: json.dumps(fields)[:40],
)
def test_values_that_cannot_be_are_refused_and_named(served, path, fields):
    status, error = ask(served, path=path, **fields)
    assert status == 400
    named = error["message"] + (error["param"] or "")
    assert any(name in named for name in fields), error
    assert "constrained" not in error["message"]


def test_a_body_of_another_type_is_told_of_json(served):
    body = b'{"prompt": "a"}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 15\r\n"
    )
    for kind in (b"", b"content-type: text/plain\r\n", b"content-type: a/b+json\r\n"):
        status, _, answer = raw.exchange(served.port, head + kind + b"\r\n" + body)
        assert status == 415
        assert "application/json" in json.loads(answer)["error"]["message"]
    kind = b"content-type: application/json; charset=utf-8\r\n"
    assert raw.exchange(served.port, head + kind + b"\r\n" + body)[0] == 200


# -- what comes back -----------------------------------------------------------------------------


def test_the_smallest_answer_is_one_token(served):
    for path in (COMPLETIONS, CHAT):
        _, answer = ask(served, path=path, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 1
        assert answer["choices"][0]["finish_reason"] == "length"


def test_a_chat_is_bounded_by_the_newer_name(served):
    _, answer = ask(served, path=CHAT, max_tokens=9, max_completion_tokens=3, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("ends", [{}, {"stop_token_ids": [68], "ignore_eos": True}])
def test_nothing_ends_an_answer_before_min_tokens(served, path, ends):
    wanted = {"logit_bias": {"2": 100} if not ends else {"68": 100}, "max_tokens": 20, **ends}
    counts = []
    for least in (0, 1, 7, 20):
        _, answer = ask(served, path=path, min_tokens=least, **wanted)
        counts.append(answer["usage"]["completion_tokens"])
        assert answer["choices"][0]["finish_reason"] == ("stop" if least < 20 else "length")
    assert counts == [1, 2, 8, 20]


def test_stop_strings_count_after_min_tokens_only_whole_and_streamed(served):
    always_b = {"logit_bias": {"68": 100}, "max_tokens": 12, "temperature": 0}
    for least, length in ((0, 0), (3, 2), (4, 3), (12, 12)):
        fields = {**always_b, "prompt": "abc", "stop": ["bb"], "min_tokens": least}
        _, answer = ask(served, **fields)
        assert answer["choices"][0]["text"] == "b" * length
        assert answer["choices"][0]["finish_reason"] == ("stop" if least < 12 else "length")
        events = stream(served, COMPLETIONS, {**fields, "stream": True})
        said = "".join(event["choices"][0]["text"] for event in events)
        assert said == "b" * length


def test_each_of_several_answers_has_the_bias(served):
    chat = served.client().chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "abc"}],
        max_tokens=5,
        n=3,
        seed=3,
        temperature=1.5,
        logit_bias={"68": 100, "69": 100},
    )
    texts = [choice.message.content for choice in chat.choices]
    assert set("".join(texts)) == {"b", "c"}
    assert len(set(texts)) > 1


def test_a_part_of_a_character_is_named_by_its_bytes(served):
    bias = {"logit_bias": {str(i): -100 for i in range(3, 70)}, "max_tokens": 8, "temperature": 1.9}
    client = served.client()
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "a"}],
        logprobs=True,
        top_logprobs=20,
        **bias,
    )
    for token in chat.choices[0].logprobs.content:
        named = [token, *token.top_logprobs]
        assert len({tuple(each.bytes) for each in token.top_logprobs}) == 20
        for each in named:
            assert bytes(each.bytes).decode(errors="backslashreplace") == each.token
    plain = client.completions.create(model="tiny", prompt="a", logprobs=20, **bias)
    logprobs = plain.choices[0].logprobs
    assert any(name.startswith("bytes:") for top in logprobs.top_logprobs for name in top)
    assert all(len(top) in (20, 21) for top in logprobs.top_logprobs)


@pytest.mark.parametrize("stops", [1, 4, 9])
def test_the_earliest_of_many_stops_ends_a_stream_wherever_it_is_cut(served, stops):
    client = served.client()
    options = {"model": "tiny", "prompt": "abc", "max_tokens": 60, "temperature": 0}
    options["extra_body"] = {"ignore_eos": True}
    text = client.completions.create(**options).choices[0].text
    wanted = [text[at : at + 6] for at in range(30, 30 + 2 * stops, 2)]
    cut = min(text.index(stop) for stop in wanted)
    events = list(client.completions.create(**options, stop=wanted, stream=True))
    assert "".join(event.choices[0].text for event in events) == text[:cut]
    assert events[-1].choices[0].finish_reason == "stop"


def test_usage_so_far_is_in_every_event(served):
    for options in ({"logprobs": None}, {"logprobs": 1}):
        body = {"prompt": ["abc", "abcdef"], "max_tokens": 5, "ignore_eos": True, "stream": True}
        body |= options
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        events = stream(served, COMPLETIONS, body)
        counted = {0: 0, 1: 0}
        for event in events[:-1]:
            (choice,) = event["choices"]
            usage = event["usage"]
            assert usage["prompt_tokens"] == (3, 6)[choice["index"]]
            assert usage["completion_tokens"] > counted[choice["index"]]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            assert (choice["logprobs"] is None) == (options["logprobs"] is None)
            counted[choice["index"]] = usage["completion_tokens"]
        assert counted == {0: 5, 1: 5}
        assert events[-1]["choices"] == []
        assert events[-1]["usage"]["completion_tokens"] == 10


def test_usage_so_far_of_a_chat_begins_with_none(served):
    body = {"messages": USER, "max_tokens": 3, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"continuous_usage_stats": True}
    events = stream(served, CHAT, body)
    assert [event["usage"]["completion_tokens"] for event in events] == [0, 1, 2, 3]
    assert all(event["choices"] for event in events)


def test_a_stream_has_no_usage_unless_asked(served):
    body = {"prompt": "abc", "max_tokens": 3, "stream": True, "ignore_eos": True}
    for options in (None, {}, {"include_usage": None}, {"include_usage": False}):
        events = stream(served, COMPLETIONS, body | {"stream_options": options})
        assert not any("usage" in event for event in events)


def test_the_token_itself_is_among_the_likeliest_named(served):
    answer = served.client().completions.create(
        model="tiny", prompt="abc", max_tokens=8, temperature=2, seed=1, logprobs=0
    )
    logprobs = answer.choices[0].logprobs
    for token, value, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert top == {token: value}


def test_a_model_is_found_by_its_name(served):
    client = served.client()
    assert client.models.retrieve("tiny").id == "tiny"
    for name in ("another", "a/b", "../tiny", "tiny\nx", "%2e%2e", "ö" * 500):
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(name)


def stream(served, path, body):
    status, _, answer = raw.ask(served.port, path, body)
    assert status == 200, answer
    lines = [line for line in raw.joined(answer).split(b"\n\n") if line.startswith(b"data: {")]
    return [json.loads(line[6:]) for line in lines]
