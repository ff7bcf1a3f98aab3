"""What the live page is told: once who it is and what runs, then how it stands.

Nothing here carries a prompt's text, a key or a salt.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from forebay.cache.view import Tree
from forebay.core.slots import SlotState
from forebay.engine.stats import EngineStats
from forebay.engine.view import RequestView
from forebay.server.lanes import LanesWire

_LONGEST_SESSION = 48


class ModeChoice(msgspec.Struct, frozen=True):
    """A mode that the server can be switched to."""

    mode: str
    name: str


class Hello(msgspec.Struct, frozen=True):
    """The first event: what never changes."""

    role: Literal["operator", "tenant"]
    model: str
    version: str
    block_tokens: int
    block_bytes: int
    modes: list[ModeChoice]


class RequestWire(msgspec.Struct, frozen=True):
    """One request; see `RequestView`."""

    id: int
    doing: str
    place: int
    session: str
    prompt: int
    computed: int
    found: int
    host: int
    near: int
    flying: bool
    answer: int
    most: int
    waited_s: float
    load_wait_s: float


class DeviceWire(msgspec.Struct, frozen=True):
    """Device slots: by use (the first five add up to `slots`), and by what is in them."""

    slots: int
    leased: int
    prefetched: int
    idle: int
    free: int
    quarantined: int
    loading: int
    dirty: int
    saving: int
    clean: int


class HostWire(msgspec.Struct, frozen=True):
    """Host slots: the rest adds up to `slots`."""

    slots: int
    used: int
    saving: int
    free: int
    quarantined: int


class TreeWire(msgspec.Struct, frozen=True):
    """The radix tree, or the largest part of it: node by node, parents first.

    `parent` is an index into the same lists, -1 for what begins a path. Of a node's own `blocks`
    the four shares, in percent, say where they lie. `weight` counts its own and all below it, and
    where `exact` is false is estimated from a sample. `total` blocks are shown or stand behind what
    is.
    """

    total: int
    exact: bool
    parent: list[int]
    blocks: list[int]
    weight: list[int]
    device: list[int]
    both: list[int]
    loading: list[int]
    host: list[int]


class Totals(msgspec.Struct, frozen=True):
    """Counters since the start, and how many requests there are."""

    mode: str
    running: int
    waiting: int
    steps: int
    preemptions: int
    stall_s: float
    load_s: float
    loaded_bytes: int
    saved_bytes: int
    prefetch_bytes: dict[str, int]
    prefetch_open_bytes: int
    link_bytes_per_s: float


class State(msgspec.Struct, frozen=True):
    """How it stands at `now_s`. What only operators see is left out for tenants."""

    now_s: float
    requests: list[RequestWire]
    tree: TreeWire | UnsetType = UNSET
    totals: Totals | UnsetType = UNSET
    device: DeviceWire | UnsetType = UNSET
    host: HostWire | UnsetType = UNSET
    lanes: LanesWire | UnsetType = UNSET


def request_wire(view: RequestView, session: str, now_s: float) -> RequestWire:
    """A request as it is told."""
    shown = session.encode(errors="replace").decode()
    if len(shown) > _LONGEST_SESSION:
        shown = shown[: _LONGEST_SESSION - 1] + "\N{HORIZONTAL ELLIPSIS}"
    started_s = now_s if view.started_s is None else view.started_s
    return RequestWire(
        id=view.id,
        doing=view.doing.value,
        place=view.place,
        session=shown,
        prompt=view.prompt_tokens,
        computed=view.computed_tokens,
        found=view.found_tokens,
        host=view.host_tokens,
        near=view.near_tokens,
        flying=view.flying,
        answer=view.answer_tokens,
        most=view.most_answer_tokens,
        waited_s=round(started_s - view.arrival_s, 3),
        load_wait_s=round(view.load_wait_s, 3),
    )


def totals_of(stats: EngineStats, link_bytes_per_s: float) -> Totals:
    """The totals of an engine."""
    cache = stats.cache
    return Totals(
        mode=stats.mode.value,
        running=stats.running,
        waiting=stats.waiting,
        steps=stats.steps,
        preemptions=stats.preemptions,
        stall_s=round(stats.stall_s, 3),
        load_s=round(cache.load_s, 3),
        loaded_bytes=cache.loaded_bytes,
        saved_bytes=cache.saved_bytes,
        prefetch_bytes=dict(cache.prefetch_bytes),
        prefetch_open_bytes=cache.prefetch_open_bytes,
        link_bytes_per_s=round(link_bytes_per_s),
    )


def tree_wire(tree: Tree) -> TreeWire:
    """A tree as it is told."""
    shares = np.rint(tree.shares * 100).astype(int).T.tolist()
    return TreeWire(
        tree.total,
        tree.exact,
        tree.parent.tolist(),
        tree.blocks.tolist(),
        tree.weight.tolist(),
        *shares,
    )


def device_of(stats: EngineStats) -> DeviceWire:
    """The device pool."""
    pools, states = stats.occupancy, stats.occupancy.device_states
    quarantined = states[SlotState.QUARANTINED]
    used = pools.device_slots - pools.device_free - pools.device_idle - quarantined
    # A block whose load failed keeps its lease and has no slot.
    prefetched = min(used, pools.device_prefetched)
    return DeviceWire(
        slots=pools.device_slots,
        leased=used - prefetched,
        prefetched=prefetched,
        idle=pools.device_idle,
        free=pools.device_free,
        quarantined=quarantined,
        loading=states[SlotState.LOADING],
        dirty=states[SlotState.DIRTY],
        saving=states[SlotState.SAVING],
        clean=states[SlotState.CLEAN],
    )


def host_of(stats: EngineStats) -> HostWire:
    """The host pool."""
    pools, states = stats.occupancy, stats.occupancy.host_states
    return HostWire(
        slots=pools.host_slots,
        used=states[SlotState.CLEAN],
        saving=states[SlotState.SAVING],
        free=pools.host_free,
        quarantined=states[SlotState.QUARANTINED],
    )
