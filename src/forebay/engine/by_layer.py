"""The first step of a request that starts by layer: each layer waits for its part of the loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay.cache import Cache
from forebay.core.requests import Ticket
from forebay.engine.attention import LayerGate
from forebay.engine.memory import EngineMemory


@dataclass(frozen=True, slots=True)
class LayerWaits:
    """Makes the gates of steps. `waited` is told of each wait: its ticket, and when it began."""

    cache: Cache
    memory: EngineMemory
    timeout_s: float
    clock: Callable[[], float]
    waited: Callable[[Ticket, float], None]

    def gate(self, tickets: Sequence[Ticket]) -> LayerGate | None:
        """What holds the layers of a step with `tickets` back; None where none starts by layer.

        It raises TransferFailedError where a part does not come: throw the step away then.
        """
        late = [ticket for ticket in tickets if ticket.band_of_layer]
        if not late:
            return None
        stream = self.memory.stream

        def gate(layer: int) -> None:
            for ticket in late:
                if ticket.band_of_layer[layer] >= ticket.bands_waited:
                    self._wait(ticket, layer, stream)

        return gate

    def _wait(self, ticket: Ticket, layer: int, stream: int) -> None:
        began_s = self.clock()
        try:
            self.cache.layer(ticket, layer, stream, self.timeout_s)
        finally:
            self.waited(ticket, began_s)
