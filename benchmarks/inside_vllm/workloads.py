"""The workloads. Each takes a client and returns its raw samples, as plain values.

Prompts come from a seed that is the workload's and the round's: every arm gets the same ones.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from accuracy import accuracy as divergence
from client import Client, Reply

Raw = dict[str, Any]
_SOLO_ANSWER = 8
_REST_S = 0.4
"""As long as the engine rests before a hit in host memory: an engine that has just worked is some
ms quicker."""


@dataclass(frozen=True, slots=True)
class Round:
    """Which round of a workload this is, on which kind of arm."""

    number: int
    tier: bool
    """Whether there is host memory at all."""
    ours: bool


async def solo(client: Client, at: Round) -> Raw:
    """One request on an idle engine: computed, found on the GPU, the same after a rest, found in
    host memory, hinted.
    """
    kinds: Raw = {}
    for length in client.sizes.solo_lengths:
        prompt = client.prompt(length)
        replies = {"cold": await client.ask(prompt, _SOLO_ANSWER)}
        replies["gpu_hit"] = await client.ask(prompt, _SOLO_ANSWER)
        await asyncio.sleep(_REST_S)
        replies["rested"] = await client.ask(prompt, _SOLO_ANSWER)
        if at.tier:
            await client.forget()
            replies["host_hit"] = await client.ask(prompt, _SOLO_ANSWER)
        if at.ours:
            await client.forget()
            replies["hinted"] = await _hinted(client, prompt)
        kinds[str(length)] = {
            kind: {**reply.sample(), "tokens": reply.tokens} for kind, reply in replies.items()
        }
    return kinds


async def _hinted(client: Client, prompt: list[int]) -> Reply:
    lead_s = client.sizes.hint_lead_s
    hint = asyncio.create_task(client.ask(prompt, 1, {"hint": {"eta_s": lead_s}}))
    await asyncio.sleep(lead_s)
    reply = await client.ask(prompt, _SOLO_ANSWER)
    await hint
    return reply


async def backlog_64(client: Client, at: Round) -> Raw:
    """All users at once, each sending its next turn when it has its answer of 64 tokens."""
    return await _backlog(client, 64)


async def backlog_16(client: Client, at: Round) -> Raw:
    """The same with answers of 16 tokens."""
    return await _backlog(client, 16)


async def _backlog(client: Client, answer: int) -> Raw:
    sizes = client.sizes
    await client.forget(host_too=True)
    contexts = [client.prompt(sizes.context) for _ in range(sizes.users)]
    questions = [[client.prompt(sizes.question) for _ in range(sizes.turns)] for _ in contexts]

    async def talk(user: int) -> list[Raw]:
        said, samples = contexts[user], []
        for question in questions[user]:
            said = said + question
            reply = await client.ask(said, answer)
            said = said + reply.tokens
            samples.append(reply.sample())
        return samples

    began_s = time.perf_counter()
    users = await asyncio.gather(*(talk(user) for user in range(sizes.users)))
    return {"answer_tokens": answer, "seconds": time.perf_counter() - began_s, "users": users}


async def no_hits(client: Client, at: Round) -> Raw:
    """Prompts that nobody has seen, all at once."""
    sizes = client.sizes
    prompts = [client.prompt(sizes.no_hit_prompt) for _ in range(sizes.no_hit_requests)]
    return await _together(client, prompts, sizes.no_hit_answer)


async def itl(client: Client, at: Round) -> Raw:
    """Running requests decode while others arrive whose KV is on the GPU, then in host memory."""
    sizes = client.sizes
    arrivals = [client.prompt(sizes.itl_prompt) for _ in range(sizes.itl_arrivals)]
    await client.forget()
    await asyncio.gather(*(client.ask(prompt, 1) for prompt in arrivals))
    told: Raw = {"device": await _decode_beside(client, arrivals)}
    if at.tier:
        await client.forget()
        told["host"] = await _decode_beside(client, arrivals)
    return told


async def _decode_beside(client: Client, arrivals: list[list[int]]) -> Raw:
    """Gaps in ms between tokens of those that run, while the others arrive and are answered."""
    sizes = client.sizes
    own = [client.prompt(2 * sizes.block_tokens) for _ in range(sizes.itl_running)]
    running = [asyncio.create_task(client.ask(prompt, sizes.itl_answer)) for prompt in own]
    await asyncio.sleep(3 * sizes.itl_gap_s)
    asked: list[asyncio.Task[Reply]] = []
    for prompt in arrivals:
        asked.append(asyncio.create_task(client.ask(prompt, 2)))
        await asyncio.sleep(sizes.itl_gap_s)
    replies = await asyncio.gather(*asked)
    runners = await asyncio.gather(*running)
    first_s = min(reply.sent_s for reply in replies)
    last_s = max(reply.ended_s for reply in replies)
    gaps: list[float] = []
    for runner in runners:
        times = runner.arrived_s
        for before_s, after_s in itertools.pairwise(times):
            if before_s >= first_s and after_s <= last_s:
                gaps.append(round((after_s - before_s) * 1e3, 4))
    return {
        "gaps_ms": gaps,
        "arrivals": [reply.sample() for reply in replies],
        "decoding_ended_first": min(runner.ended_s for runner in runners) < last_s,
    }


async def thrash(client: Client, at: Round) -> Raw:
    """Requests whose KV is in host memory, five times what the GPU holds, all at once."""
    sizes = client.sizes
    dice, client.dice = client.dice, random.Random(5)
    prompts = [client.prompt(sizes.thrash_prompt) for _ in range(sizes.thrash_requests)]
    client.dice = dice
    if at.number == 0:
        await client.forget(host_too=True)
        for prompt in prompts:
            await client.ask(prompt, 1)
    await client.forget()
    client.dice.shuffle(prompts)
    return await _together(client, prompts, sizes.thrash_answer)


async def convoy(client: Client, at: Round) -> Raw:
    """Many requests at once on one prefix that is in host memory, and others of that prefix when
    it has been on the GPU for a moment.
    """
    sizes = client.sizes
    prefix = client.prompt(sizes.convoy_prefix)
    await client.ask(prefix, 1)
    await client.forget()

    async def all_of_them() -> Raw:
        suffixes = [client.prompt(sizes.convoy_suffix) for _ in range(sizes.convoy_requests)]
        return await _together(client, [prefix + suffix for suffix in suffixes], 4)

    told = await all_of_them()
    await asyncio.sleep(_REST_S)
    return told | {"on_gpu": await all_of_them()}


async def accuracy(client: Client, at: Round) -> Raw:
    """How far answers over what came from host memory are from those over what stayed."""
    return await divergence(client, ours=at.ours) if at.tier else {}


async def _together(client: Client, prompts: list[list[int]], answer: int) -> Raw:
    began_s = time.perf_counter()
    replies = await asyncio.gather(*(client.ask(prompt, answer) for prompt in prompts))
    seconds = time.perf_counter() - began_s
    return {
        "answer_tokens": answer,
        "seconds": seconds,
        "first_s": [round(reply.arrived_s[0] - began_s, 6) for reply in replies],
        "requests": [reply.sample() for reply in replies],
    }


async def warm_up(client: Client, at: Round) -> Raw:
    """Every shape that will be timed, once: long and short, cold and found, alone and together."""
    long = client.prompt(max(client.sizes.solo_lengths))
    short = [client.prompt(client.sizes.convoy_suffix) for _ in range(4)]
    await asyncio.gather(*(client.ask(prompt, 8) for prompt in (long, *short)))
    await client.forget()
    await client.ask(long, 8)
    await client.forget(host_too=True)
    return {}


WORKLOADS: dict[str, Callable[[Client, Round], Awaitable[Raw]]] = {
    each.__name__: each
    for each in (warm_up, solo, backlog_64, backlog_16, no_hits, itl, thrash, convoy, accuracy)
}
