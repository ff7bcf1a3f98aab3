"""The half in vLLM's scheduler: the same core as everywhere, over vLLM's queue and block pool.

vLLM matches, admits and preempts by itself. This brings what its waiting requests lack into its
block pool before their turn, so that vLLM finds it in its own prefix cache. When vLLM asks about a
request whose loads have not landed it is told to ask again at its next step, and goes on with
others. There is no second way for a hit to come in: what is late, refused or failed is computed.

Nothing takes a block of vLLM's pool while vLLM schedules: it may have looked up blocks that it does
not hold yet. Loads start when the step is complete (`orders`), on an idle engine before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from forebay.cache.account import CacheStats
from forebay.cache.ahead import LookAhead
from forebay.cache.loads import Loads
from forebay.cache.parts import Parts
from forebay.cache.saves import Saves
from forebay.config import CacheSettings
from forebay.core.block_ids import ids_for
from forebay.core.requests import Waiting
from forebay.core.store import Store
from forebay.vllm.adapter import (
    BlockPool,
    Step,
    VllmRequest,
    awaits_outputs,
    left,
    lora_name,
)
from forebay.vllm.groups import ONE_GROUP, Groups
from forebay.vllm.messages import News, Orders
from forebay.vllm.scheduler.books import Books
from forebay.vllm.scheduler.control import ModeFile
from forebay.vllm.scheduler.copies import Copies
from forebay.vllm.scheduler.guard import Guard
from forebay.vllm.scheduler.hints import NO_HINTS, HintBounds, Hints
from forebay.vllm.scheduler.last_block import LastBlocks
from forebay.vllm.scheduler.lately import Lately
from forebay.vllm.scheduler.lookups import Lookups
from forebay.vllm.scheduler.loras import Loras
from forebay.vllm.scheduler.mailbox import Hands, Mailbox
from forebay.vllm.scheduler.misnamed import Misnamed
from forebay.vllm.scheduler.naming import Naming
from forebay.vllm.scheduler.near import NearLoads
from forebay.vllm.scheduler.pool import VllmDevicePool
from forebay.vllm.scheduler.records import Record, Turn
from forebay.vllm.scheduler.roster import Roster
from forebay.vllm.scheduler.turns import Turns
from forebay.vllm.scheduler.unwritten import Unwritten
from forebay.vllm.seen.events import HostEvents

_IDLE_PIECE_BYTES = 256 << 20
"""A load on an idle engine goes in such pieces over each link, 5 ms of a fast one: it begins
sooner."""
_PIECE_BYTES = 2 << 30
"""And any other in such: each takes its part of the time of a step, and so does its end."""


class SchedulerHalf:
    """Decides over `pool`. One thread calls it, in the order of vLLM's scheduler.

    `most_running` and `step_tokens` are vLLM's limits, `draft_slots` what the latter leaves out for
    each request, `dropped` blocks of what it finds are computed once more. `by_priority` is its
    policy, `kept_free` its watermark in blocks, `frees_idle` as the pool has it, `key_bytes` the
    width of its block hashes.
    `hint_bounds` is what hints may take, `mode_file` the off switch, `events` says whether anybody
    wants KV events. A part of each block moves over each of `links`. vLLM takes `most_loras` at a
    time. Requests that are `misnamed` are kept out of host memory. `groups` are the model's.
    `hands` gives the worker where it is in this thread, `clock` is that of the worker, in seconds.
    """

    def __init__(
        self,
        settings: CacheSettings,
        pool: BlockPool,
        *,
        key_bytes: int,
        most_running: int,
        step_tokens: int,
        draft_slots: int = 0,
        dropped: int = 0,
        by_priority: bool = False,
        kept_free: int = 0,
        frees_idle: bool = False,
        hint_bounds: HintBounds = NO_HINTS,
        mode_file: str = "",
        events: bool = False,
        links: int = 1,
        most_loras: int = 0,
        misnamed: Misnamed | None = None,
        groups: Groups = ONE_GROUP,
        hands: Callable[[], Hands | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self._clock = clock
        self._most_running = most_running
        self._links = links
        step = len(groups) * (-(-step_tokens // settings.block_tokens) + most_running)
        slots = settings.device_slots, settings.host_slots
        self._device = device = VllmDevicePool(
            pool,
            ids_for(*slots),
            block_tokens=settings.block_tokens,
            kept_free=kept_free,
            frees_idle=frees_idle,
            groups=groups,
        )
        self._guard = Guard(
            device,
            settings.block_tokens,
            step_tokens,
            most_running,
            draft_slots=draft_slots,
            in_order=not by_priority,
        )
        # The worker says how many there are, with its first output: saves wait for that.
        self._host_slots = 0
        self._store = store = Store(key_bytes, *slots, device, lambda: self._host_slots)
        self._mail = mail = Mailbox(settings.device_slots, hands)
        parts = Parts.over(settings, store, mail, last_too=not groups.beside, dropped=dropped)
        self.rates = parts.rates
        self._switch = parts.switch
        self._line = parts.line
        self._flights = parts.flights
        self._ledger = parts.ledger
        self._loads = loads = Loads(parts, self._patience_s, self._piece_blocks)
        self._ahead = LookAhead(parts, loads)
        self._saves = saves = Saves(parts, displaces=True, step_blocks=step, links=links)
        self._mode_file = ModeFile(mode_file, settings.mode)
        self._lately = Lately(device)
        self._roster = roster = Roster(
            settings.block_tokens, parts.line, self._lately, by_priority=by_priority
        )
        self._hints = hints = Hints(hint_bounds, parts.line, roster, loads, groups)
        self.books = Books(parts, pool, loads.link, hints)
        self.events: HostEvents | None = None
        if events:
            self.events = store.host.watch = HostEvents(
                store.max_blocks, settings.block_tokens, device.content_of, groups.path
            )
        self._naming = Naming(parts, pool, device, saves, self.events, groups)
        self._last_blocks = LastBlocks(parts, pool, device)
        self._lookups = Lookups()
        self._unwritten = Unwritten(pool, device, settings.block_tokens, groups)
        self._loras = Loras(most_loras)
        self._misnamed = misnamed
        self._turns = turns = Turns(parts, device, loads, hints)
        account = self.books.account
        self._copies = Copies(parts, device, mail, loads, saves, account, roster.by_id)
        self._near = NearLoads(parts, device, mail, loads, self._copies, turns)

    # -- requests --------------------------------------------------------------------------------

    def arrive(self, request: VllmRequest) -> None:
        """vLLM queued a request."""
        now_s = self._clock()
        self._look_at_mode(now_s)
        record = self._roster.arrived(request, now_s)
        if self._loras.replaced(request):
            self._keep_out(request.lora_request.lora_name)
        if self._misnamed is not None and self._misnamed.may_be(request):
            record.wishes = record.wishes.kept_out()
        self.books.asked(record)
        self._hints.take_up(record, now_s, looks_ahead=self._switch.policy.look_ahead)
        self._roster.wait(record)
        self._begin_at_once(record)

    def asked(self, request: VllmRequest, local_tokens: int) -> int | None:
        """vLLM could start `request` with `local_tokens` that it found itself. Takes no block.

        Returns how many more are brought to a block of its own, or None where it should ask again
        at its next step.
        """
        record = self._roster.find(request)
        if record is None:
            return 0
        if self._loras.one_too_many(request, self._roster.in_steps):
            self._lookups.hold(record)
            return None
        entry = self._line.get(record.id)
        looked_up = self._lookups.asked(record)
        if self._turns.puts_off_again(record, entry):
            self._lookups.put_off(record)
            return None
        self._catch_up()
        record.local_tokens, now_s = local_tokens, self._clock()
        if self._turns.puts_off(record, entry, now_s, idle=self._idle):
            self._lookups.put_off(record)
            return None
        if not looked_up:
            return None
        return 0 if entry is None else self._last_blocks.tokens(record, entry)

    def admitted(self, request: VllmRequest, block: int | None) -> None:
        """vLLM starts `request` with what it found when it last asked, and `block` for what more is
        brought.
        """
        self._loras.started(request)
        record = self._roster.find(request)
        entry = None if record is None else self._line.get(record.id)
        if record is not None and awaits_outputs(request):
            # vLLM 0.26 may count a token twice: nothing that comes of it is saved.
            record.wishes = record.wishes.kept_out()
        if record is None or entry is None:
            return
        if block is not None:
            self._last_blocks.admitted(record, block)
        if record.hint is not None:
            self._hints.answered(record.id)
            return
        self._turns.over(record)
        record.session = entry.session
        now_s = self._clock()
        self.books.started(record, entry, now_s)
        self._loads.leave(entry)
        self._hints.came(request, now_s)

    def finish(self, request: VllmRequest) -> dict[str, Any] | None:
        """The request ended, whatever its state; its blocks are vLLM's still.

        Returns what its client is told.
        """
        record, ran = self._roster.ended(request)
        if record is None:
            return None
        self._turns.over(record)
        self._lookups.over(record)
        if ran:
            self._catch_up()
            namespace = self._roster.namespace
            self._naming.name(namespace, record, request.num_computed_tokens)
            self._naming.end(namespace, record)
            if record.hint is None and not left(request):
                self.rates.answered(request.num_output_tokens)
                path, others = self._naming.left(namespace, record)
                self._lately.ended(path, self._clock(), others)
        self._loras.ended(request, self._device.resets)
        self._hints.ended(record)
        entry = self._line.get(record.id)
        if entry is not None and record.hint is None:
            self._loads.leave(entry)
        return record.answer()

    # -- steps -----------------------------------------------------------------------------------

    def orders(self, step: Step) -> Orders:
        """vLLM scheduled `step`: what the worker does around it."""
        number = self._store.newest_step + 1
        self._store.newest_step = number
        now_s = self._clock()
        self._look_at_mode(now_s)
        self._catch_up()
        self._hints.expire(now_s)
        self._lately.expire(now_s)
        handed_out = self._device.take_handed_out()
        settle = self._mail.saves_reading(handed_out)
        preempted = self._roster.preempted(step)
        self._unwritten.scheduled(step, handed_out, preempted)
        for record in preempted:
            self._naming.end(self._roster.namespace, record)
        for record, tokens in self._roster.follow(step, preempted):
            self._naming.name(self._roster.namespace, record, tokens)
        lack, held = self._turns.lack_loads, self._near.under_way
        self.books.scheduled(number, step, now_s, loads_lack=lack, held=held)
        running = self._roster.running
        free_run_slots = max(0, self._most_running - len(running))
        self._turns.start_next(free_run_slots, now_s)
        self._ledger.expire(now_s, self._store.device.wanted, self.settings.slack_s)
        if len(self._line):
            left = (record.progress(self.rates) for record in running.values())
            self._ahead.plan(now_s, left, free_run_slots, 0)
        self._copies.name_loads(now_s)
        runs = (record.request for record in running.values())
        self._guard.scheduled(step, runs, self._line)
        if self._host_slots:
            self._saves.flush(now_s)
        self._device.load_stamp = number
        self._lookups.step_over()
        self._loras.step_over()
        return self._mail.post(number, settle, self._last_blocks.take(number), idle=not step.tokens)

    def heard(self, step: int, told: News | None) -> None:
        """The output of the step of this number came, with the worker's news, if there are any."""
        self.books.step_ended(step, self._clock())
        self._last_blocks.step_ended(step)
        self.look()
        if told is not None:
            self._take(told)

    def look(self) -> None:
        """See what is new with a worker in this thread. Not while vLLM schedules."""
        news = self._mail.look()
        if news is not None:
            self._take(news)
        if self._idle:
            self._near.approach(self._lookups, self._clock())

    @property
    def busy(self) -> bool:
        """Whether vLLM must go on stepping: for copies, or for events that it has not been told."""
        self._catch_up()  # with a reset of vLLM's cache, before the next request comes
        if self._copies.under_way or (self.events is not None and self.events.waiting):
            return True
        # What waits for host memory to be pinned is saved with the steps of a later request.
        return self._host_slots > 0 and self._saves.pending

    @property
    def gives_back_soon(self) -> bool:
        """Whether loads hold blocks that vLLM's pool has back soon."""
        return self._copies.gives_back_soon(self._clock())

    def forget_all(self) -> None:
        """What was saved so far is not to be found any more: the weights may be others."""
        here = [record.request for record in self._roster.by_id.values()]
        self._device.disown_loads()
        self._turns.clear()
        self._hints.drop_all()
        self._lately.drop_all()
        self._catch_up()
        self._loras.forget(self._device.resets, here)
        waiting = [self._roster.by_id[entry.request.id] for entry in self._line]
        for entry in list(self._line):
            self._loads.leave(entry)
        self._store.unpublish_all()
        self._roster.start_anew(waiting)

    def stats(self) -> CacheStats:
        """Counters since the start."""
        return self.books.stats()

    # -- inside: the worker's news ---------------------------------------------------------------

    def _take(self, told: News) -> None:
        now_s = self._clock()
        self._catch_up()
        self._host_slots = told.host_slots
        self._store.advance(told.report.completed_step)
        self._copies.reported(told.report, now_s)
        self._catch_up()
        if told.report.completions:
            self._lookups.look_again(lambda record: self._turns.ready(record, now_s))

    # -- inside: the queue -----------------------------------------------------------------------

    def _keep_out(self, name: str) -> None:
        """Nothing is loaded or saved for the LoRA of this name any more; what was is not found."""
        self._device.disown(name)
        self._catch_up()
        for record in list(self._roster.by_id.values()):
            if lora_name(record.request) != name or record.wishes.keeps_out:
                continue
            record.wishes = record.wishes.kept_out()
            self._hints.drop(record)
            entry = self._line.get(record.id)
            if entry is not None:
                self._turns.over(record)
                self._loads.leave(entry)
                self._roster.wait(record)
                record.turn = Turn.NOT_ASKED

    def _begin_at_once(self, record: Record) -> None:
        """On an idle engine the next step is this request's: its loads need not wait for it."""
        entry = self._line.get(record.id)
        if entry is None or self._line.head(1) != [entry] or not self._idle:
            return
        now_s = self._clock()
        self._catch_up()
        if record.hint is None:
            self._turns.begin(entry, now_s)
        else:
            self._ahead.plan(now_s, (), self._most_running, 0)
        self._copies.name_loads(now_s)
        self._near.approach(self._lookups, now_s)

    def _look_at_mode(self, now_s: float) -> None:
        """The operator's switch: before a request's loads begin, and at every step."""
        self._switch.change(self._mode_file.look(now_s), self.settings.host_slots)
        if len(self._hints) and not self._switch.policy.look_ahead:
            self._hints.drop_all()  # nobody would bring what they wait for

    @property
    def _idle(self) -> bool:
        """Whether no step computes anything and no request could."""
        return not self.books.computes and not self._roster.running

    def _piece_blocks(self) -> int:
        """Of the loads that begin now."""
        piece_bytes = _IDLE_PIECE_BYTES if self._idle else _PIECE_BYTES
        return max(1, self._links * piece_bytes // self.settings.block_bytes)

    def _patience_s(self, entry: Waiting) -> float:
        """How long a request waits for its loads once its turn has come: while others go on, so
        what is in flight may take twice its estimate, and two steps to be heard of.
        """
        copied = self._flights.load_blocks * self.settings.block_bytes
        load_s = self.rates.load_latency_s.value + self.rates.load_s(copied)
        return 2 * (load_s + self.books.slow_step_s)

    # -- inside: blocks --------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Take note of what vLLM's pool took away."""
        lost = self._device.catch_up()
        if not len(lost):
            return
        if self._device.leases(lost).any():
            for entry in self._line:
                here = self._store.resident(entry.blocks[: entry.covered])
                if not here.all():
                    self._line.uncover(entry, int(np.argmin(here)))
        self._store.left_device(lost)
