"""Single tokens as log-probabilities name them: their text, and the bytes that they stand for.

A token may be a part of a character. It has no text then, but bytes, from which a client can put
the character together; it is named by them, so that two such tokens do not look the same.
"""

from __future__ import annotations

import codecs
import re
from typing import Any, NamedTuple

_BROKEN = "\ufffd"
# How tokenizers with a fallback to bytes write one that is in no other token.
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenName(NamedTuple):
    """What a token is called, and its bytes in UTF-8; None where the tokenizer does not tell.

    A special one, like the end of a text, is not `shown` in an answer.
    """

    text: str
    raw: bytes | None
    shown: bool = True

    @property
    def is_part(self) -> bool:
        """Whether it is no whole text by itself."""
        return self.raw is not None and _is_part(self.raw)

    @property
    def in_old_form(self) -> str:
        """As OpenAI's completions write it."""
        return f"bytes:{self.text}" if self.is_part else self.text


class TokenNames:
    """The names of a tokenizer's tokens. A model without a tokenizer has empty ones."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))

    def __call__(self, token_id: int) -> TokenName:
        """The name of one token."""
        if self._tokenizer is None:
            return TokenName("", None)
        text = self._tokenizer.decode([token_id])
        if _BROKEN not in text:
            raw = text.encode(errors="replace")
            return TokenName(text, raw, token_id not in self._special)
        raw = self._bytes_of(token_id, text)
        if raw is None or not _is_part(raw):
            return TokenName(text, raw)
        return TokenName(raw.decode(errors="backslashreplace"), raw)

    def _bytes_of(self, token_id: int, text: str) -> bytes | None:
        """By both ways in which tokenizers spell bytes; it counts only if it gives the `text`."""
        spelled = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(spelled, str):
            return None
        fallback = _FALLBACK.fullmatch(spelled)
        if fallback is not None:
            return bytes([int(fallback[1], 16)])
        if spelled == text:
            return text.encode()
        if not all(character in _SPELLED for character in spelled):
            return None
        raw = bytes(_SPELLED[character] for character in spelled)
        return raw if raw.decode(errors="replace") == text else None


class TextOffset:
    """Where in an answer's text its next token begins: a part of a character adds none yet."""

    def __init__(self) -> None:
        self._characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def passed(self, name: TokenName) -> int:
        """Where the token of this name begins."""
        begins = self._characters
        if name.shown:
            text = name.text if name.raw is None else self._decoder.decode(name.raw)
            self._characters += len(text)
        return begins


def _is_part(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return True
    return False


def _spelled() -> dict[str, int]:
    """Bytes by the characters that byte-level tokenizers spell them with, from GPT-2 on: printable
    ones of Latin-1 stand for themselves, the others for characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_SPELLED = _spelled()
