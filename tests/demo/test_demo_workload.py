"""What the demonstration's clients send."""

from __future__ import annotations

import pytest
from talker import small_talk

from forebay.demo.workload import Script, Turn, everyday_workload


def test_six_users_hold_four_turns_over_one_system_prompt():
    workload = everyday_workload()
    assert workload.system
    assert len({each.topic for each in workload.conversations}) == 6
    assert workload.turns == 24
    for each in workload.conversations:
        assert len(each.messages) == 4
        assert all(message == message.strip() and message for message in each.messages)
        assert "  " not in "".join(each.messages)


def test_a_later_turn_repeats_the_conversation_with_the_reference_answers():
    workload = small_talk()
    script = Script(workload)
    script.offer(Turn(1, 0), "forty-two")
    script.offer(Turn(0, 0), "of another user")
    first, second = workload.conversations[1].messages[:2]
    opening = [
        {"role": "system", "content": workload.system},
        {"role": "user", "content": first},
    ]
    assert script.messages(Turn(1, 0)) == opening
    assert script.messages(Turn(1, 1)) == [
        *opening,
        {"role": "assistant", "content": "forty-two"},
        {"role": "user", "content": second},
    ]


def test_the_first_answer_offered_stays_the_reference():
    script = Script(small_talk())
    script.offer(Turn(0, 0), "first")
    script.offer(Turn(0, 0), "second")
    assert script.messages(Turn(0, 1))[2]["content"] == "first"


def test_a_turn_whose_conversation_is_unknown_cannot_be_asked():
    with pytest.raises(KeyError):
        Script(small_talk()).messages(Turn(0, 1))
