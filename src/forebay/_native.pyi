from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.transfer.messages import Transfer

def leak_warnings(on: bool) -> None:
    """Whether objects of this module that are left when the process ends are told of."""

class PoolLayout:
    def __init__(
        self,
        base_address: int,
        slots: int,
        fragments: Sequence[tuple[int, int, int]],
        seam_bytes: int = 0,
    ) -> None: ...
    @property
    def slots(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...

class Core:
    def __init__(
        self,
        backend: str,
        device: PoolLayout,
        host: PoolLayout,
        *,
        window_bytes: int,
        lanes: int,
        link_bytes_per_s: float,
        window_timeout_s: float,
        most_transfers: int,
        window_records: int,
        seed: int,
        longest_delay_s: float,
        device_index: int,
        spin_s: float,
        timing: bool,
        piece_by_piece: bool,
    ) -> None: ...
    def submit(self, transfers: Sequence[Transfer]) -> None: ...
    def cancel(self, ids: NDArray[np.int64]) -> None: ...
    def expedite(self, ids: NDArray[np.int64], transfer_class: int, deadline_s: float) -> None: ...
    def use_bands(self, ids: NDArray[np.int64], ends: Sequence[int]) -> None: ...
    def step_launched(self, step: int, stream: int) -> None: ...
    def step_abandoned(self, step: int) -> None: ...
    def poll(
        self,
    ) -> tuple[
        tuple[int, ...],
        tuple[tuple[int, int], ...],
        list[tuple[int, int, int, int, int, float, float, str, int]],
        int,
    ]: ...
    def wait(
        self, ids: NDArray[np.int64], stream: int, timeout_s: float, band: int
    ) -> tuple[int, int]: ...
    def wait_news(self, timeout_s: float) -> bool: ...
    def windows(self) -> tuple[bytes, int]: ...
    def when(self, driver_event: int) -> float | None: ...
    def close(self, timeout_s: float) -> None: ...
    @property
    def events(self) -> int: ...
    @property
    def events_in_use(self) -> int: ...
    @property
    def live_transfers(self) -> int: ...
    def hold_lane(self, direction: int, lane: int) -> None: ...
    def release_lane(self, direction: int, lane: int) -> None: ...
    def fail_window(self, direction: int, skip: int) -> None: ...
    def sim_stream(self) -> int: ...
    def hold_stream(self, stream: int) -> None: ...
    def release_stream(self, stream: int) -> None: ...
    def sim_fill(self, stream: int, slots: NDArray[np.int32], value: int) -> None: ...
    def sim_checksum(self, stream: int, slots: NDArray[np.int32]) -> int: ...
    def sim_result(self, ticket: int, timeout_s: float) -> list[int]: ...

def cuda_devices() -> list[tuple[str, int, int, int]]: ...

class PinnedMemory:
    def __init__(
        self,
        size_bytes: int,
        *,
        address: int,
        device_index: int,
        grain_bytes: int,
        slice_bytes: int,
        share: float,
        threads: int,
        numa_node: int,
        in_place: bool,
    ) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def slice_bytes(self) -> int: ...
    @property
    def ready_bytes(self) -> int: ...
    @property
    def how(self) -> str: ...
    @property
    def error(self) -> str: ...
    def wait_ready(self, bytes: int, timeout_s: float) -> bool: ...
    def close(self) -> None: ...

_Ids = NDArray[np.int32]

class Directory:
    """The trees behind `forebay.core.directory.Directory`, which says what each call does.

    A session is that module's `Session`, field by field.
    """

    def __init__(self, key_bytes: int, run_bytes: int) -> None: ...
    def __len__(self) -> int: ...
    def __contains__(self, block: int) -> bool: ...
    @property
    def node_count(self) -> int: ...
    def match(
        self,
        namespace: bytes,
        keys: bytes,
        session: tuple[bytes, int, int, _Ids, bytes | None] | None,
    ) -> tuple[_Ids, int, int]:
        """The ids of the longest published prefix, its last block or -1, and its insert."""

    def insert(
        self,
        namespace: bytes,
        keys: bytes,
        first: int,
        ids: _Ids,
        session: tuple[bytes, int, int, _Ids, bytes | None] | None,
    ) -> _Ids: ...
    def match_each(self, namespace: bytes, keys: bytes) -> _Ids: ...
    def insert_each(self, namespace: bytes, keys: bytes, ids: _Ids) -> _Ids: ...
    def is_leaf(self, block: int) -> bool: ...
    def parent(self, block: int) -> int: ...
    def remove_leaf(self, block: int) -> None: ...
    def remove_leaves(self, blocks: _Ids) -> NDArray[np.bool_]: ...
    def remove_subtree(self, block: int) -> _Ids: ...
    def outline(
        self,
        namespaces: Sequence[bytes] | None,
        max_blocks: int,
        most_parts: int,
        most_blocks: int,
    ) -> tuple[_Ids, _Ids, _Ids, _Ids, _Ids, int, bool]:
        """The fields of `forebay.core.directory.Outline`, in order."""

    def check(self) -> None: ...
    def dump(self) -> bytes: ...

class EvictionOrder:
    """Which blocks to give up first: those released longest ago, children before parents.

    A path is released at once and stands leaf first. Because every lease covers a path from its
    root, a parent is always released together with, or later than, its children: giving up from
    the front is leaf-first by construction. Blocks stand in one of two ranks (0 or 1), each an
    order of its own; a block is in one of them at most. Every call costs time in proportion to the
    blocks that it is given, returns or passes over, however many stand.

    A block that is held stands nowhere; `hold` says what holds it, in words for errors: "a lease".
    A block named twice is held twice.

    Blocks are ids below `max_blocks`, in one-dimensional int32 arrays; anything else is a
    `ProtocolError`, with nothing changed. Arrays returned are read-only.
    """

    def __init__(self, max_blocks: int, hold: str) -> None: ...
    def count(self, rank: int) -> int:
        """Blocks that stand in `rank`."""

    def contains(self, blocks: _Ids) -> NDArray[np.bool_]:
        """Whether each block stands in either rank."""

    def holds(self, blocks: _Ids) -> _Ids:
        """The holds on each block."""

    def held(self, blocks: _Ids) -> NDArray[np.bool_]:
        """Whether each block is held."""

    def hold(self, blocks: _Ids) -> None:
        """One hold more on each block, none of which stands any longer."""

    def release(self, blocks: _Ids) -> _Ids:
        """One hold less on each block. Returns those that nobody holds now, in order.

        They do not stand yet. Raises `ProtocolError`, with nothing changed, for a block that nobody
        holds.
        """

    def append(self, blocks: _Ids, rank: int) -> None:
        """Put `blocks` (root first) at the end of `rank`. Moves those that stand already.

        Raises `ProtocolError`, with nothing changed, for a block that is held.
        """

    def prepend(self, blocks: _Ids, rank: int) -> None:
        """Put `blocks` (leaf first, as `pop` gave them) at the very front of `rank`.

        Moves those that stand already. Raises `ProtocolError`, with nothing changed, for a block
        that is held.
        """

    def discard(self, blocks: _Ids) -> None:
        """Take `blocks` out of the order; those that are not in it are left alone."""

    def pop(self, count: int, rank: int, busy: NDArray[np.bool_] | None = None) -> _Ids:
        """Take up to `count` of the first blocks that are not `busy` (indexed by block), leaf
        first.

        Busy blocks keep their place. What a caller cannot use after all, it gives back with
        `prepend`.
        """

    def pop_newest(self, count: int, rank: int) -> _Ids:
        """Take up to `count` blocks from the end: the most recently released, root first."""

    def peek(self, count: int, rank: int) -> _Ids:
        """The first `count` blocks of `rank` (or all), leaf first; nothing is changed."""

class BlockCounts:
    """How many hold each block. Blocks are ids below `max_blocks`, as for `EvictionOrder`.

    `what` is counted, in words for errors: "a lease". A block named twice counts twice.
    """

    def __init__(self, max_blocks: int, what: str) -> None: ...
    @property
    def held(self) -> int:
        """Blocks with a count above zero."""

    def of(self, blocks: _Ids) -> _Ids:
        """The count of each block."""

    def any(self, blocks: _Ids) -> NDArray[np.bool_]:
        """Whether the count of each block is above zero."""

    def add(self, blocks: _Ids) -> _Ids:
        """One more for each block. Returns those that had none, in order."""

    def take_away(self, blocks: _Ids) -> _Ids:
        """One less for each block. Returns those that have none now, in order.

        Raises `ProtocolError`, with nothing changed, where there is none to take away.
        """

class NumberColumn:
    """An int64 for each id below `count`, 0 to begin with.

    This and the other columns are for tables that are looked up while vLLM schedules. numpy lets go
    of the interpreter lock in each of its look-ups, however short; another thread then keeps it for
    milliseconds. These do not let go of it. `ids` are one-dimensional int32 arrays; one that is not
    below `count` is a `ProtocolError`, with nothing changed.
    """

    def __init__(self, count: int) -> None: ...
    def take(self, ids: _Ids) -> NDArray[np.int64]:
        """The number of each."""

    def put(self, ids: _Ids, value: int) -> None:
        """All of them have this number."""

    def put_up(self, ids: _Ids, first: int) -> None:
        """The first has `first`, and each of the others one more than the one before it."""

    def raise_to(self, ids: _Ids, number: int) -> None:
        """None of them has less."""

    def marked(self, ids: _Ids) -> NDArray[np.bool_]:
        """Whether the number of each is other than 0."""

    def runs(self, ids: _Ids) -> list[tuple[int, int]]:
        """The numbers other than 0 along `ids`, each with how many have it one after another, those
        with 0 left out.
        """

    def clear_runs(self, ids: _Ids) -> list[tuple[int, int]]:
        """The same, and all of them have 0 from now on."""

class SlotColumn:
    """An int32 for each id below `count`, -1 to begin with. See `NumberColumn`."""

    def __init__(self, count: int) -> None: ...
    def take(self, ids: _Ids) -> _Ids:
        """The number of each."""

    def put(self, ids: _Ids, value: int) -> None:
        """All of them have this number."""

    def put_each(self, ids: _Ids, slots: _Ids) -> None:
        """Each has its own, of as many."""

class FlagColumn:
    """A bool for each id below `count`, False to begin with. See `NumberColumn`."""

    def __init__(self, count: int) -> None: ...
    def take(self, ids: _Ids) -> NDArray[np.bool_]:
        """The flag of each."""

    def put(self, ids: _Ids, value: bool) -> None:
        """All of them have this flag."""

    def of(self, id: int) -> bool:
        """The flag of one."""

    def numbers(self) -> _Ids:
        """The ids with True, in order."""

class StateColumn:
    """A state, 0 to 5, for each slot below `count`, 0 to begin with. See `NumberColumn`.

    A slot of -1, none, can be looked up: its state is 0.
    """

    def __init__(self, count: int) -> None: ...
    def take(self, slots: _Ids) -> NDArray[np.int8]:
        """The state of each."""

    def counts(self, slots: _Ids) -> list[int]:
        """How many of `slots` are in each state."""

    def put(self, slots: _Ids, value: int) -> None:
        """All of them have this state."""

def count_true(flags: NDArray[np.bool_]) -> int:
    """How many of `flags` are True, without letting go of the interpreter lock."""

class SlotBooks:
    """What lies in the slots of a pool that somebody else owns: where each block is, in which
    `SlotState` (0 to 5), who leases it and who wants it.

    Blocks are ids below `max_blocks`, slots numbers below `slots`, both in one-dimensional int32
    arrays; anything else is a `ProtocolError`, with nothing changed. A block is *here* where it has
    a slot and no copy reads or writes it.
    """

    def __init__(self, max_blocks: int, slots: int) -> None: ...
    def settle_in(self, blocks: _Ids, slots: _Ids, state: int) -> None:
        """Each block is in its slot from now on; what was there is not."""

    def leave(self, blocks: _Ids) -> None:
        """`blocks` have no slot any more."""

    def move(self, blocks: _Ids, state: int) -> _Ids:
        """Change the state of `blocks`. Returns those that were being loaded, in order."""

    def relocate(self, block: int, slot: int) -> bool:
        """`block` is in `slot` now. False, with nothing changed, where another block is."""

    def quarantine(self, slots: int) -> None:
        """So many slots are out of use for good."""

    def lease(self, blocks: _Ids, prefetch: bool) -> None:
        """One lease more on each block; `prefetch`: of that kind."""

    def release(self, blocks: _Ids, prefetch: bool) -> _Ids:
        """One lease less on each block. Returns those that nobody leases now, in order."""

    def promote(self, blocks: _Ids) -> None:
        """A prefetch lease on each block becomes one of the other kind."""

    def want(self, blocks: _Ids, asked: bool) -> None:
        """One more wants each block: who waits for it, or, if not `asked`, who will perhaps."""

    def unwant(self, blocks: _Ids, asked: bool) -> None:
        """One less wants each block."""

    def slot_of(self, blocks: _Ids) -> _Ids:
        """The slot of each block, -1 where it has none."""

    def along(self, path: _Ids) -> tuple[int, int, int]:
        """See `DevicePool.along`."""

    def absent(self, path: _Ids) -> _Ids:
        """See `DevicePool.absent`."""

    def state(self, blocks: _Ids) -> NDArray[np.int8]:
        """The state of each block's slot; 0 where it has none."""

    def busy(self, blocks: _Ids) -> NDArray[np.bool_]:
        """Whether a copy reads or writes each block."""

    def leases(self, blocks: _Ids) -> _Ids:
        """Leases on each block, of both kinds."""

    def asked(self, blocks: _Ids) -> NDArray[np.bool_]:
        """Whether somebody waits for each block."""

    def blocks_in(self, slots: _Ids) -> _Ids:
        """The blocks in `slots`, each once, in order; slots in which none is are left out."""

    def all_blocks(self) -> _Ids:
        """All blocks that are in a slot."""

    def in_state(self, state: int) -> int:
        """Slots in that state; of those that are FREE it knows none."""

    @property
    def known(self) -> int:
        """Slots in any state but FREE."""

    @property
    def leased_here(self) -> int:
        """Leased blocks that are here."""

    @property
    def wanted_here(self) -> int:
        """Wanted blocks that are here and not leased."""

    @property
    def prefetch_leased(self) -> int:
        """Blocks under at least one prefetch lease."""

class FreeQueue:
    """vLLM's queue of free blocks. `queue` is vLLM's, `blocks` all blocks of its pool."""

    def __init__(self, queue: object, blocks: object) -> None: ...
    def first(self, count: int) -> _Ids:
        """The ids of the first `count` (or all), in the order in which they are handed out."""

    def spare(self, books: SlotBooks, count: int, most: int, wanted_too: bool) -> int:
        """Move blocks that are leased, or, if `wanted_too`, wanted, to the tail, in their order,
        until `count` others stand in front; of `most` blocks at most.

        Returns how many others stand in front now, at most `count`.
        """

    def make_way(self, books: SlotBooks, count: int, most: int) -> int:
        """See to it that `count` blocks that are not leased stand in front, unwanted ones before
        those that were wanted last, looking at `most` blocks of the queue at most, or, where none
        is wanted, at as many as it needs.

        Returns how many of those stand in front now, at most `count`.
        """

    def guard(self, books: SlotBooks, count: int) -> None:
        """Make way for `count` that will be taken soon; does nothing where way was made before and
        nothing has changed but that some were taken.
        """

    def ids(self, blocks: object) -> _Ids:
        """The ids of a list of blocks."""

    def with_ids(self, ids: _Ids) -> list[Any]:
        """The blocks of these ids, free or not. Raises `ProtocolError` for an id of none."""
