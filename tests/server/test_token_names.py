"""What log-probabilities call a token that is a part of a character, and where it stands."""

from __future__ import annotations

import pytest
import transformers
from byte_tokens import byte_tokenizer
from tokenizers import Tokenizer, decoders, models

from forebay.server.token_names import TextOffset, TokenNames

TEXT = "né \U0001f600 \ufffd!"


@pytest.fixture(scope="module")
def names() -> TokenNames:
    return TokenNames(byte_tokenizer())


def test_bytes_of_parts_make_the_text(names: TokenNames):
    ids = byte_tokenizer()(TEXT)["input_ids"]
    named = [names(token_id) for token_id in ids]
    assert b"".join(name.raw or b"" for name in named) == TEXT.encode()
    assert [name.text for name in named[:3]] == ["n", "\\xc3", "\\xa9"]
    assert [name.in_old_form for name in named[:3]] == ["n", "bytes:\\xc3", "bytes:\\xa9"]
    assert len({name.text for name in named}) == len(set(ids)), "no two of them look the same"


def test_offsets_count_characters_of_the_text(names: TokenNames):
    offset = TextOffset()
    offsets = [offset.passed(names(token_id)) for token_id in byte_tokenizer()(TEXT)["input_ids"]]
    assert offsets == [0, 1, 1, 2, 3, 3, 3, 3, 4, 5, 5, 5, 6]


def test_what_is_not_shown_takes_no_room(names: TokenNames):
    offset = TextOffset()
    assert [offset.passed(names(token_id)) for token_id in (68, 2, 69)] == [0, 1, 1]


def test_every_token_of_a_byte_level_vocabulary_has_its_bytes(names: TokenNames):
    tokenizer = byte_tokenizer()
    raws = [names(token_id).raw for token_id in range(3, 259)]
    assert sorted(raw for raw in raws if raw) == [bytes([byte]) for byte in range(256)]
    assert names(2).raw == names(2).text.encode() == tokenizer.eos_token.encode()


def test_a_fallback_to_bytes_is_understood_and_a_real_replacement_character_is_text():
    vocabulary = {"<unk>": 0, "<0xE2>": 1, "<0x41>": 2, "\ufffd": 3, "\u2581x": 4}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    names = TokenNames(transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    assert names(1)[:2] == ("\\xe2", b"\xe2")
    assert names(2)[:2] == ("A", b"A")
    assert names(3)[:2] == ("\ufffd", "\ufffd".encode())


def test_without_a_tokenizer_there_is_nothing_to_tell():
    assert TokenNames(None)(5)[:2] == ("", None)
