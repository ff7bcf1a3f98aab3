"""LoRA adapters: whether a name stands for what it stood for before, and how many run at a time.

vLLM names a block by its LoRA's name (0.26), or by its name and path (0.32), and not by what is in
it. So one that was loaded anew under a name finds what was computed with the one before, for as
long as vLLM's own pool has it. Host memory would have it for much longer: it has nothing to do with
such a name any more.

vLLM starts no request for one LoRA more than it takes at a time (`--max-loras`), but of those that
run it counts the ones alone that are in the step which it schedules, and it dies of one too many in
a later step. It leaves some of them out while blocks that they need are on their way back: where
loads hold those, or steps that overlap, which is where there is a connector.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from forebay.vllm.adapter import VllmRequest, lora_of

_logger = logging.getLogger("forebay.vllm")


class Loras:
    """The LoRAs that were asked for, by name, each with what told it from others when it came.

    vLLM takes `most` at a time, or none at all.
    """

    def __init__(self, most: int = 0) -> None:
        self._most = most
        # The numbers of those that run, in the step that vLLM is scheduling, once they are asked
        # for.
        self._run: set[int] | None = None
        self._known: dict[str, tuple[int, str] | None] = {}
        # That vLLM's cache had when the last request for one ended.
        self._resets = -1

    def replaced(self, request: VllmRequest) -> bool:
        """Whether the LoRA of `request`, which arrives, may be another one than its name stood for.

        A server counts what it loads, but keeps the number of one that it loads in place, and says
        of all requests for that one that it was.
        """
        lora = request.lora_request
        if lora is None:
            return False
        now = _what(request)
        was = self._known.setdefault(lora.lora_name, now)
        if was == now and not lora.load_inplace:
            return False
        if was is not None:
            self._known[lora.lora_name] = None
            _logger.warning(
                "LoRA %r was loaded anew: its requests are kept out of host memory until the "
                "prefix cache and the connector are reset. A name of its own avoids that",
                lora.lora_name,
            )
        return True

    def ended(self, request: VllmRequest, resets: int) -> None:
        """vLLM has `request` no more, and its cache has had so many `resets`."""
        if request.lora_request is not None:
            self._resets = resets

    def forget(self, resets: int, here: Iterable[VllmRequest]) -> None:
        """Nothing that was saved is found any more, and vLLM's cache has had so many `resets`.
        Names may stand for what they like: but for those of requests that are `here`, and unless
        vLLM may have what was computed for one that has ended.
        """
        if resets <= self._resets:
            return
        self._known.clear()
        for request in here:
            if request.lora_request is not None:
                name, now = request.lora_request.lora_name, _what(request)
                if self._known.setdefault(name, now) != now:
                    self._known[name] = None

    def one_too_many(
        self, request: VllmRequest, in_steps: Callable[[], Iterable[VllmRequest]]
    ) -> bool:
        """Whether vLLM must not start `request`, about which it asks, beside those `in_steps`.

        Of what was preempted and has outputs to come the LoRA stays taken until they came: 0.26
        dies of one that its outputs end while it is put off for its LoRA, by whomever.
        """
        lora = lora_of(request)
        if lora is None or not self._most:
            return False
        if self._run is None:
            of = map(lora_of, in_steps())
            self._run = {each[0] for each in of if each is not None}
        return len(self._run) >= self._most and lora[0] not in self._run

    def started(self, request: VllmRequest) -> None:
        """vLLM starts `request`."""
        lora = lora_of(request)
        if lora is not None and self._run is not None:
            self._run.add(lora[0])

    def step_over(self) -> None:
        """vLLM has scheduled."""
        self._run = None


def _what(request: VllmRequest) -> tuple[int, str]:
    """What tells the LoRA of `request` from others of its name."""
    return int(request.lora_request.lora_int_id), str(request.lora_request.lora_path)
