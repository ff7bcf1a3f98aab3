"""A transfer that many requests wait for is demanded once."""

from __future__ import annotations

import numpy as np

from forebay.core.flights import Flight, Flights


def flights_of(count: int) -> Flights:
    flights = Flights(1)
    for _ in range(count):
        flights.add(Flight(flights.next_id(), True, np.zeros(1, np.int32), 0.0))
    return flights


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
