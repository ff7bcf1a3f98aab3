"""What names a request of vLLM's is put together once. Needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from forebay.vllm.scheduler.records import Record
from forebay.vllm.scheduler.wishes import Wishes


def record_of(hashes: list[bytes]) -> Record:
    request: Any = SimpleNamespace(block_hashes=hashes)
    return Record(1, request, 0.0, Wishes())


def test_the_keys_of_a_request_are_one_object_until_it_has_more():
    record = record_of([b"ab", b"cd"])
    keys = record.keys()
    assert keys == b"abcd"
    assert record.keys() is keys
    record.request.block_hashes.append(b"ef")
    assert record.keys() == b"abcdef"


def test_keys_follow_hashes_that_changed():
    record = record_of([b"ab", b"cd"])
    record.keys()
    record.request.block_hashes[:] = [b"ab", b"xy"]
    assert record.keys() == b"abxy"
    record.request.block_hashes.clear()
    assert record.keys() == b""
