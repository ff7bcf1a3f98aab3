"""A toy engine whose model has several groups of layers, some of which look back through a window.

The first group of full attention is the toy's own model. The KV of a position in another one is a
number made of that one's there, and of its own at the far end of the window, or just before, where
all is read. A token comes of all KV that its request may read, in all groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm_toy import BLOCK_TOKENS, Asked, Pass, ToyEngine
from vllm_toy_model import far, group_kv, groups_answers, groups_kv_of, path_of


class GroupsPass(Pass):
    """One step's part of a request, in all groups, whose block tables are `tables`."""

    def __init__(
        self,
        asked: Asked,
        start: int,
        count: int,
        tables: list[list[int]],
        windows: tuple[int, ...],
    ) -> None:
        super().__init__(asked, start, count)
        self._windows = windows
        self._tables = [np.repeat(table, BLOCK_TOKENS) for table in tables]

    def through(self, content: NDArray[np.int64], layers: list[int]) -> None:
        """Write and read the KV of these layers, of all that are in `content`."""
        super().through(content, layers)
        for layer in layers:
            mine = content[layer]
            for group in range(len(self._windows)):
                if group != path_of(self._windows):
                    self._through_group(mine, group, layer, len(content))

    def _through_group(self, mine: NDArray[np.int64], group: int, layer: int, of: int) -> None:
        slots, window = self._tables[group], self._windows[group]
        for place in range(self.start, self.end):
            at = place % BLOCK_TOKENS
            state = int(mine[self._slots[place], at])
            back = far(place, window)
            before = int(mine[slots[back], back % BLOCK_TOKENS]) if place else 0
            mine[slots[place], at] = group_kv(state, group, before)
        first = max(0, self.end - window) if window else 0
        for place in range(first, self.end):
            if place % of == layer:
                self._total += int(mine[slots[place], place % BLOCK_TOKENS])


class GroupsEngine(ToyEngine):
    """An engine of a model with a group of layers for each of `windows`."""

    def __init__(self, model: Path, *, windows: tuple[int, ...], **more: Any) -> None:
        self.windows = windows
        self._tables: dict[str, list[list[int]]] = {}
        super().__init__(model, **more)

    def _passes(self, output: Any) -> list[Pass]:
        path, starts = path_of(self.windows), dict[str, int]()
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = [list(each) for each in new.block_ids]
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, blocks, start in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            before = self._tables[name]
            if name in cached.resumed_req_ids:
                before = [[] for _ in self.windows]
            new_blocks = blocks or [()] * len(self.windows)
            self._tables[name] = [[*old, *new] for old, new in zip(before, new_blocks, strict=True)]
            starts[name] = start
        passes: list[Pass] = []
        for name, count in output.num_scheduled_tokens.items():
            self.asked[name].table = self._tables[name][path]
            asked, tables = self.asked[name], self._tables[name]
            passes.append(GroupsPass(asked, starts[name], count, tables, self.windows))
        return passes

    def answer_to(self, asked: Asked, count: int) -> list[int]:
        """What the model says to a request."""
        return groups_answers(asked.prompt, count, self.windows)

    def kv_of(self, asked: Asked, tokens: Iterable[int]) -> list[list[int]]:
        """The KV of each of `tokens`, the first ones of a request, in each group of layers."""
        return groups_kv_of(tokens, self.windows)
