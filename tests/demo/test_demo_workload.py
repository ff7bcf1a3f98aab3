"""The demonstration's prompts continue each other token by token."""

from __future__ import annotations

import numpy as np
import pytest
from talker import small_talk, talker_tokenizer

from forebay.demo.workload import Script, Turn, everyday_workload
from forebay.engine.text import chat_prompt
from forebay.errors import ModelError


def test_six_users_hold_four_turns_over_one_system_prompt():
    workload = everyday_workload()
    assert workload.system
    assert len({each.topic for each in workload.conversations}) == 6
    assert workload.turns == 24
    for each in workload.conversations:
        assert len(each.messages) == 4
        assert all(message == message.strip() and message for message in each.messages)
        assert "  " not in "".join(each.messages)


def test_a_later_prompt_goes_on_with_the_reference_answer():
    tokenizer = talker_tokenizer()
    script = Script(tokenizer, small_talk())
    first = script.prompt(Turn(1, 0))
    answer = tokenizer("forty-two")["input_ids"]
    script.offer(Turn(1, 0), answer)
    second = script.prompt(Turn(1, 1))
    assert np.array_equal(second[: len(first)], first)
    assert np.array_equal(second[len(first) : len(first) + len(answer)], answer)
    messages = small_talk().conversations[1].messages
    whole = chat_prompt(
        tokenizer,
        [
            {"role": "system", "content": small_talk().system},
            {"role": "user", "content": messages[0]},
            {"role": "assistant", "content": "forty-two"},
            {"role": "user", "content": messages[1]},
        ],
    )
    assert np.array_equal(second, whole)


def test_tokens_are_kept_where_their_text_would_be_tokenized_differently():
    script = Script(talker_tokenizer(), small_talk())
    odd = [2, 130, 2]  # an end token and half a character
    script.offer(Turn(0, 0), odd)
    first, second = script.prompt(Turn(0, 0)), script.prompt(Turn(0, 1))
    assert second[len(first) : len(first) + 3].tolist() == odd


def test_the_first_answer_offered_stays_the_reference():
    script = Script(talker_tokenizer(), small_talk())
    script.offer(Turn(0, 0), [5, 6])
    before = script.prompt(Turn(0, 1))
    script.offer(Turn(0, 0), [7])
    assert np.array_equal(script.prompt(Turn(0, 1)), before)


def test_a_tokenizer_that_cannot_chat_is_refused():
    tokenizer = talker_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        Script(tokenizer, small_talk()).prompt(Turn(0, 0))
    tokenizer.chat_template = "{{ messages[-1].content }}"
    script = Script(tokenizer, small_talk())
    script.offer(Turn(0, 0), [5])
    with pytest.raises(ModelError, match="does not repeat earlier answers"):
        script.prompt(Turn(0, 1))
