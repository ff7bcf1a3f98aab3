"""A toy engine that guesses tokens: guesses are right or wrong at random, and so is how many.

Wrong ones leave wrong KV where they lay, until the next step writes over it. An engine whose way to
guess has layers of its own has one such layer: its KV is that of the others, and it writes last in
a step, also of tokens that come further on.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput
from vllm_real import output_of
from vllm_toy import BLOCK_TOKENS, Asked, Pass, ToyEngine
from vllm_toy_model import VOCAB, answers, mix

WITH_LAYERS = ("draft_model", "eagle", "eagle3", "mtp")


class DraftPass(Pass):
    """One step's part of a request, whose last tokens are `drafts`."""

    def __init__(
        self, asked: Asked, start: int, count: int, drafts: list[int], *, own_layer: bool
    ) -> None:
        super().__init__(asked, start, count)
        # Where steps overlap vLLM counts on earlier guesses that turned out wrong since.
        self.start = min(start, len(asked.tokens) - 1)
        self.end = self.start + count
        self._slots = np.repeat(asked.table, BLOCK_TOKENS)
        self._known = asked.tokens
        self._tokens = asked.tokens + drafts
        self._read = np.zeros(self.end, np.int64)
        self._own_layer = own_layer

    def through(self, content: NDArray[np.int64], layers: list[int]) -> None:
        """Write and read the KV of these layers, of all that are in `content`."""
        if self._own_layer:
            content, layers = content[:-1], layers[:-1]
        places = np.arange(self.end)
        for layer in layers:
            self._write(content[layer], self.start, self._tokens[self.start : self.end])
            read = places[places % len(content) == layer]
            self._read[read] = content[layer][self._slots[read], read % BLOCK_TOKENS]

    def sampled(self) -> list[int]:
        """The token that comes of it, if one does, behind the drafts that are what comes of those
        before.
        """
        given: list[int] = []
        totals = np.cumsum(self._read)
        for place in range(len(self._known) - 1, self.end):
            given.append(int(totals[place]) % VOCAB)
            if self._tokens[place + 1 : place + 2] != given[-1:]:
                break
        self.asked.tokens += given
        return given

    def through_own(self, content: NDArray[np.int64], drafts: list[int]) -> None:
        """Write the layer that makes the `drafts`, the last one of `content`."""
        mine = content[-1]
        self._write(mine, self.start, self._tokens[self.start : self.end])
        if drafts:
            known = self.asked.tokens
            self._write(mine, len(known) - 1, [known[-1], *drafts[:-1]])

    def _write(self, mine: NDArray[np.int64], start: int, tokens: list[int]) -> None:
        state, before = self.asked.first, start - 1
        if start:
            state = int(mine[self._slots[before], before % BLOCK_TOKENS])
        for place, token in enumerate(tokens, start):
            state = mix(state, token)
            mine[self._slots[place], place % BLOCK_TOKENS] = state


class DraftingEngine(ToyEngine):
    """An engine whose way to guess vLLM calls `method`: `most` tokens of a request in a step, as
    `seed` says. With `early` a worker answers before they are made, as those of vLLM's first model
    runner do.
    """

    def __init__(
        self,
        model: Path,
        *,
        method: str = "ngram",
        most: int = 3,
        seed: int = 0,
        early: bool = True,
        **options: Any,
    ) -> None:
        self._method, self._most, self._early = method, most, early
        self._own_layer = method in WITH_LAYERS
        super().__init__(model, stages=self._own_layer, **options)
        self._overlap = self.scheduler.defer_block_free = self.lag > 0
        self._dice = random.Random(seed)
        self._drafts: dict[str, list[int]] = {}
        self._under_way: list[DraftPass] = []
        self.guessed = self.right = 0

    def configured(self, arguments: Any) -> Any:
        """vLLM's configuration by these arguments, and to guess."""
        ngrams = {"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": self._most}
        arguments.speculative_config = ngrams
        config = super().configured(arguments)
        # There is no such model here.
        object.__setattr__(config.speculative_config, "method", self._method)
        return config

    def _passes(self, output: Any) -> list[Pass]:
        new = {each.req_id for each in output.scheduled_new_reqs}
        for name in new | set(output.scheduled_cached_reqs.resumed_req_ids):
            self._drafts.pop(name, None)
        drafts = output.scheduled_spec_decode_tokens
        self._under_way = [
            DraftPass(
                each.asked,
                each.start,
                each.end - each.start,
                self._guesses(name, drafts.get(name, [])),
                own_layer=self._own_layer,
            )
            for name, each in zip(output.num_scheduled_tokens, super()._passes(output), strict=True)
        ]
        return list(self._under_way)

    def _guesses(self, name: str, scheduled: list[int]) -> list[int]:
        """What is computed where so many are scheduled: where steps overlap only the worker knows
        them, and it has none for a request that just came.
        """
        if self.lag and name in self._drafts:
            return self._drafts[name][: len(scheduled)]
        return scheduled

    def _compute(self, output: Any) -> list[list[int]]:
        sampled = super()._compute(output)
        for name, given in zip(output.num_scheduled_tokens, sampled, strict=True):
            self._drafts.pop(name, None)
            if given:
                self._drafts[name] = self._guess(self.asked[name])
        return sampled

    def _told(self, worker: Any, names: list[str], sampled: list[list[int]]) -> Any:
        news = self._news(worker) if self._early else None
        if names:
            for name, each in zip(names, self._under_way, strict=True):
                if self._own_layer:
                    each.through_own(self._content, self._drafts.get(name, []))
            worker.wait_for_save()
        news = news or self._news(worker)
        worker.clear_connector_metadata()
        return output_of(names, sampled, news)

    def _news(self, worker: Any) -> KVConnectorOutput:
        return KVConnectorOutput(kv_connector_worker_meta=worker.build_connector_worker_meta())

    def _guess(self, asked: Asked) -> list[int]:
        """The next tokens, as far as they are right, and others behind them."""
        most = self._most
        count = most if self.lag or self._own_layer else self._dice.randrange(most + 1)
        right = min(count, self._dice.randrange(most + 2))
        drafts = answers(asked.tokens, right, asked.first)
        self.guessed, self.right = self.guessed + count, self.right + right
        # Not what is right by chance.
        return drafts + [VOCAB] * (count - right)

    def _take(self, output: Any, told: list[Any]) -> None:
        super()._take(output, told)
        names = list(output.num_scheduled_tokens)
        if names and not self.lag:
            drafts = [self._drafts.get(name, []) for name in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
