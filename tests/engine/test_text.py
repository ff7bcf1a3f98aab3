"""Text that comes out a piece at a time is the text that comes out at once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.engine.text import Detokeniser, StopStrings, chat_prompt, encode
from forebay.errors import ModelError, RequestError

TEXTS = ["plain words", "naïve 日本語 😀👩‍👧 end", "  spaces\n\tkept  ", "٣½ ©", "�", "a�b", ""]


def streamed(tokenizer, ids, **settings):
    detokeniser = Detokeniser(tokenizer, **settings)
    pieces = [detokeniser.push(token_id) for token_id in ids]
    return pieces, detokeniser.finish()


@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_has_half_a_character(byte_tokenizer, text):
    ids = byte_tokenizer(text)["input_ids"]
    pieces, rest = streamed(byte_tokenizer, ids)
    assert "".join(pieces) + rest == text
    if "�" not in text:
        assert all("�" not in piece for piece in pieces)
        assert rest == ""


def test_each_character_comes_as_soon_as_it_is_whole(byte_tokenizer):
    pieces, _ = streamed(byte_tokenizer, byte_tokenizer("a😀b")["input_ids"])
    assert pieces == ["a", "", "", "", "😀", "b"]


def test_smollm2_text_streams_to_the_same_text(smollm2):
    text = "def f(x):\n    return '日本 😀'  # 12 naïve\n" * 3
    pieces, rest = streamed(smollm2.tokenizer, smollm2.tokenizer(text)["input_ids"])
    assert "".join(pieces) + rest == text
    assert "�" not in "".join(pieces)


def test_spaces_between_pieces_are_kept(piece_tokenizer):
    ids = piece_tokenizer.convert_tokens_to_ids(["▁hello", "▁world", "s", "!", "▁hello"])
    assert streamed(piece_tokenizer, ids)[0] == ["hello", " world", "s", "!", " hello"]
    continued, _ = streamed(piece_tokenizer, ids[1:], after=ids[:1])
    assert continued == [" world", "s", "!", " hello"]


def test_special_tokens_leave_no_trace(piece_tokenizer):
    ids = piece_tokenizer.convert_tokens_to_ids(["▁hello", "</s>", "▁world"])
    assert "".join(streamed(piece_tokenizer, ids)[0]) == "hello world"
    shown, _ = streamed(piece_tokenizer, ids, skip_special_tokens=False)
    assert "</s>" in "".join(shown)


@pytest.mark.parametrize("text", ["日本", "😀😀", "é!"])
def test_bytes_of_a_piece_vocabulary_join_to_characters(piece_tokenizer, text):
    names = [f"<0x{byte:02X}>" for byte in text.encode()]
    pieces, rest = streamed(piece_tokenizer, piece_tokenizer.convert_tokens_to_ids(names))
    assert "".join(pieces) + rest == text
    assert "�" not in "".join(pieces)


def test_bytes_that_never_become_text_come_out_at_the_end(byte_tokenizer):
    half = byte_tokenizer("ok 😀")["input_ids"][:-2]
    pieces, rest = streamed(byte_tokenizer, half)
    assert "".join(pieces) == "ok "
    assert rest == "�"


def test_endless_broken_bytes_are_not_held_for_ever(byte_tokenizer):
    broken = byte_tokenizer("日")["input_ids"][1:2]
    detokeniser = Detokeniser(byte_tokenizer)
    shown = "".join(detokeniser.push(broken[0]) for _ in range(400))
    assert 200 < len(shown) <= 400
    assert set(shown) == {"�"}


def test_a_stop_string_across_pieces_is_found_and_not_shown():
    stops = StopStrings(["</end>", "STOP"])
    shown = [stops.push(piece) for piece in ["Hello <", "/en", "x> ", "ST", "O", "P it", "more"]]
    assert shown == ["Hello ", "", "</enx> ", "", "", "", ""]
    assert stops.matched == "STOP"
    assert stops.finish() == ""


def test_a_stop_counts_only_where_it_ends_in_text_that_is_searched():
    stops = StopStrings(["abc", "b"])
    shown = stops.push("xb", search=False) + stops.push("ab", search=False)
    assert stops.matched is None
    assert shown == "xb", "what a stop string may begin with is held back"
    assert stops.push("x") == "abx"
    assert stops.matched is None
    assert stops.push("ab", search=False) == ""
    assert stops.push("c") == ""
    assert stops.matched == "abc"


def test_text_that_only_looked_like_a_stop_comes_at_the_end():
    stops = StopStrings(["\n\n"])
    assert stops.push("a\n") == "a"
    assert stops.finish() == "\n"
    assert stops.matched is None


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_pieces_do_not_matter_to_stop_strings(pieces, stops):
    watcher = StopStrings(stops)
    shown = "".join(watcher.push(piece) for piece in pieces) + watcher.finish()
    text = "".join(pieces)
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    if watcher.matched is None:
        assert not ends
        assert shown == text
    else:
        assert shown + watcher.matched == text[: len(shown) + len(watcher.matched)]
        assert not any(stop in shown for stop in stops)


def test_a_chat_prompt_follows_the_template(smollm2):
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    ids = chat_prompt(smollm2.tokenizer, messages)
    assert ids.dtype == np.int64
    assert smollm2.tokenizer.decode(ids) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_chat_that_cannot_be_built_says_why(byte_tokenizer, smollm2):
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(ModelError, match="no chat template"):
        chat_prompt(byte_tokenizer, messages)
    with pytest.raises(RequestError, match="role and content"):
        chat_prompt(smollm2.tokenizer, [{"role": "user"}])
    assert encode(byte_tokenizer, "ab").dtype == np.int64
