"""A model's steps over random KV; its decode step on a GPU is timed by the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from forebay.engine.models import LoadedModel, adopt_model
from forebay.engine.pool import KVPool
from forebay.engine.runner import Chunk, Runner, probe_geometry
from forebay.geometry import Geometry
from forebay.measure.copies import HEAD_START_CYCLES

BLOCK_TOKENS = 16
_WARM_UPS = 3


def llama_8b() -> LoadedModel:
    """A model of the shape of Llama 3 8B on the GPU, in bf16, with random weights: 16 GB."""
    config = transformers.LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return adopt_model(model, name="a model of the shape of Llama 3 8B")


class GraphedStep:
    """Work on the device, captured once as a graph, so that a replay does not wait for the host.

    `work` runs a few times before; what it reads is kept alive with it.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        for _ in range(_WARM_UPS):
            work()
        torch.cuda.synchronize()
        self._work = work
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            work()

    def replay_ms(self) -> float:
        """Milliseconds of one replay, of the device's time and nothing of the host's."""
        return device_ms(self._graph.replay)


class DecodeStep(GraphedStep):
    """The engine's decode step of `model` for `requests` requests of `context` tokens each.

    The graph has its work on the device, without what the host does before it. Takes a pool of its
    own, `requests * context` tokens of KV.
    """

    def __init__(self, model: LoadedModel, *, requests: int = 8, context: int = 2048) -> None:
        geometry = probe_geometry(model, BLOCK_TOKENS)
        self.requests, self.context = requests, context
        self._runner, tables = filled_runner(model, geometry, requests, context)
        self._chunks = [Chunk(np.array([5]), context - 1, row) for row in tables]
        packed = self._runner._pack(self._chunks)  # pyright: ignore[reportPrivateUsage]
        packed = replace(packed, tokens=packed.tokens.cuda(), positions=packed.positions.cuda())
        run = self._runner._run  # pyright: ignore[reportPrivateUsage]
        super().__init__(lambda: run(packed, packed.last_rows))

    def eager_ms(self) -> float:
        """The same launched kernel by kernel, as the engine does, the host's part included."""
        return device_ms(lambda: self._runner.forward(self._chunks))


class WeightsStep(GraphedStep):
    """Every weight matrix of `model` read once, for `rows` tokens: a decode step's bound.

    No decode step is more bound by memory, so none suffers more from copies.
    """

    def __init__(self, model: LoadedModel, *, rows: int = 8) -> None:
        linears = [m for m in model.model.modules() if isinstance(m, torch.nn.Linear)]
        self.weights_bytes = sum(each.weight.nbytes for each in linears)
        inputs = {
            each.in_features: torch.randn(
                rows, each.in_features, dtype=each.weight.dtype, device="cuda"
            )
            for each in linears
        }

        def work() -> None:
            with torch.inference_mode():
                for each in linears:
                    torch.nn.functional.linear(inputs[each.in_features], each.weight)

        super().__init__(work)


def filled_runner(
    model: LoadedModel, geometry: Geometry, requests: int, tokens: int
) -> tuple[Runner, NDArray[np.int32]]:
    """A runner over a pool of its own full of random KV, and the slots of `requests` requests of
    `tokens` tokens in it, a row each.
    """
    blocks = -(-tokens // geometry.block_tokens)
    device = model.model.device
    pool = KVPool(geometry, requests * blocks, dtype=model.kv_dtype, device=device)
    for part in pool.parts:
        part.normal_()
    tables = np.arange(requests * blocks, dtype=np.int32).reshape(requests, blocks)
    return Runner(model, pool), tables


def device_ms(work: Callable[[], object]) -> float:
    """Milliseconds between events before and behind what `work` launches on the current stream.

    A kernel that spins goes before, so that a graph's launch is over when the first event comes.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START_CYCLES)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
