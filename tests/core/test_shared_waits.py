"""What many requests on one prefix share is asked for, and put together, once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from forebay.core.flights import Flight, Flights
from forebay.vllm.scheduler.records import Record
from forebay.vllm.scheduler.wishes import Wishes


def flights_of(count: int) -> Flights:
    flights = Flights(1)
    for _ in range(count):
        flights.add(Flight(flights.next_id(), True, np.zeros(1, np.int32), 0.0))
    return flights


def record_of(hashes: list[bytes]) -> Record:
    request: Any = SimpleNamespace(block_hashes=hashes)
    return Record(1, request, 0.0, Wishes())


def test_a_load_is_demanded_once_however_many_wait_for_it():
    flights = flights_of(3)
    assert flights.demand({2, 1}) == [1, 2]
    assert flights.demand({1, 2, 3}) == [3]
    flights.end(3)
    assert flights.demand({3}) == []


def test_who_waits_lacks_what_is_in_flight_and_not_near():
    flights = flights_of(2)
    assert flights.lacks_any({1, 2})
    near = flights.get(1)
    assert near is not None
    near.near = True
    assert flights.lacks_any({1, 2})
    assert not flights.lacks_any({1})
    flights.end(2)
    assert not flights.lacks_any({1, 2})
    assert flights.un_ended({1, 2}) == {1}


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
