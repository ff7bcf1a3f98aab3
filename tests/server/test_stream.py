"""From what a step brings to bytes: exchanges, senders and events, without a server."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from forebay.engine.request import FinishReason
from forebay.errors import ForebayError
from forebay.server.exchange import Exchange, Outcome, Piece
from forebay.server.sender import Sender
from forebay.server.shapes import ChatShape, CompletionShape


def last(index: int = 0) -> Piece:
    outcome = Outcome(FinishReason.LENGTH, "", 3, 2, 0, 0, 0.0, 0.0, 0.1, 0.2, 0)
    return Piece(index, "", (), outcome)


def heard(exchange: Exchange) -> list[str]:
    """All that a listener of `exchange` hears until it ends."""
    texts: list[str] = []
    asyncio.run(exchange.tell(lambda pieces: texts.extend(piece.text for piece in pieces)))
    return texts


def test_what_came_before_somebody_listened_is_heard_first():
    exchange = Exchange(1)
    exchange.push([Piece(0, "a"), Piece(0, "b")])
    exchange.push([last()])
    assert heard(exchange) == ["a", "b", ""]


def test_an_exchange_that_is_not_read_keeps_text_not_events():
    exchange = Exchange(2)
    for step in range(10_000):
        exchange.push([Piece(step % 2, "ab"[step % 2])])
        assert len(exchange._pieces) <= 256
    exchange.push([last(0), last(1)])
    texts = heard(exchange)
    assert len(texts) <= 256
    assert "".join(texts).count("a") == "".join(texts).count("b") == 5000


def test_an_error_comes_after_what_was_said_before_it():
    exchange = Exchange(1)
    exchange.push([Piece(0, "a")])
    exchange.fail(ForebayError("over"))
    exchange.push([Piece(0, "b")])
    texts: list[str] = []
    with pytest.raises(ForebayError, match="over"):
        asyncio.run(exchange.tell(lambda pieces: texts.extend(piece.text for piece in pieces)))
    assert texts == ["a"]


def test_a_listener_that_fails_ends_its_own_exchange_only():
    def broken(_: list[Piece]) -> None:
        raise ValueError("no such text")

    async def both() -> list[object]:
        first, second = Exchange(1), Exchange(1)
        telling = [asyncio.ensure_future(e.tell(f)) for e, f in ((first, broken), (second, kept))]
        await asyncio.sleep(0)
        for exchange in (first, second):
            exchange.push([Piece(0, "a")])
            exchange.push([last()])
        return await asyncio.gather(*telling, return_exceptions=True)

    texts: list[str] = []

    def kept(pieces: list[Piece]) -> None:
        texts.extend(piece.text for piece in pieces)

    failed, ended = asyncio.run(both())
    assert isinstance(failed, ValueError)
    assert ended is None
    assert texts == ["a", ""]


def test_nobody_hears_silence_before_it_lasted_from_one_tick_to_the_next():
    async def listen() -> list[int]:
        exchange, sizes = Exchange(1), []
        telling = asyncio.ensure_future(exchange.tell(lambda pieces: sizes.append(len(pieces))))
        await asyncio.sleep(0)
        exchange.tick()
        exchange.push([Piece(0, "a")])
        exchange.tick()
        assert sizes == [1]
        exchange.tick()
        exchange.push([last()])
        await telling
        return sizes

    assert asyncio.run(listen()) == [1, 0, 1]


class SlowClient:
    """An ASGI `send` that waits at each message until it is let go."""

    def __init__(self) -> None:
        self.got: list[str] = []
        self.go = asyncio.Event()

    async def send(self, message: object) -> None:
        while not self.go.is_set():
            await self.go.wait()
        self.got.append(str(message))


def put(sender: Sender, pieces: list[Piece]) -> None:
    sender.put({"body": "".join(piece.text for piece in pieces)})


def test_a_slow_client_holds_its_exchange_and_then_gets_everything_in_order():
    async def stream() -> None:
        client, exchange = SlowClient(), Exchange(1)
        sender = Sender(client.send, exchange)
        telling = asyncio.ensure_future(exchange.tell(lambda pieces: put(sender, pieces)))
        await asyncio.sleep(0)
        for text in "abc":
            exchange.push([Piece(0, text)])
        exchange.push([last()])
        await asyncio.sleep(0)
        assert client.got == []
        assert not telling.done()
        client.go.set()
        await telling
        assert client.got == ["{'body': 'a'}", "{'body': 'bc'}"]
        client.go.clear()

    asyncio.run(stream())


def test_a_send_that_fails_late_ends_the_exchange():
    async def stream() -> None:
        go = asyncio.Event()

        async def send(_: object) -> None:
            await go.wait()
            raise OSError("the client is gone")

        exchange = Exchange(1)
        sender = Sender(send, exchange)
        telling = asyncio.ensure_future(exchange.tell(lambda pieces: put(sender, pieces)))
        await asyncio.sleep(0)
        exchange.push([Piece(0, "a")])
        go.set()
        with pytest.raises(OSError, match="gone"):
            await telling
        await sender.rest()

    asyncio.run(stream())


def test_a_sender_that_is_closed_gives_up_what_waits():
    async def stream() -> None:
        client, exchange = SlowClient(), Exchange(1)
        sender = Sender(client.send, exchange)
        sender.put({"body": "a"})
        sender.close()
        await sender.rest()
        client.go.set()
        await asyncio.sleep(0)
        assert client.got == []

    asyncio.run(stream())


@pytest.mark.parametrize(
    "text", ["plain", 'a "quote" \\ and\nline', "\u00e4\U0001f600\u2028", "\x00"]
)
@pytest.mark.parametrize("index", [0, 3])
def test_the_short_way_to_an_event_says_what_the_long_one_does(text: str, index: int):
    for shape in (ChatShape('a "model"', False, str), CompletionShape("m", False, str)):
        for _ in range(2):
            short, long = shape.event(Piece(index, text)), shape._text_event(index, text)
            assert short == long
            choice = msgspec.json.decode(short.removeprefix(b"data: "))["choices"][0]
            assert choice["index"] == index
            assert text == choice.get("text", choice.get("delta", {}).get("content"))
            assert choice["finish_reason"] is None


def test_tools_do_not_take_the_text_apart():
    plain, tools = ChatShape("m", False, str), ChatShape("m", False, str, tools=True)
    tools.id, tools.created = plain.id, plain.created
    assert tools.event(Piece(0, "some text")) == plain.event(Piece(0, "some text"))
