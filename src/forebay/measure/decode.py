"""A model's decode step on a GPU, timed by the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import transformers

from forebay.engine.models import LoadedModel, adopt_model
from forebay.engine.pool import KVPool
from forebay.engine.runner import Chunk, Runner, probe_geometry
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


class DecodeStep:
    """The engine's decode step of `model` for `requests` requests of `context` tokens each.

    Its work on the device is captured once as a graph, so that a replay does not wait for the host.
    Takes a pool of its own, `requests * context` tokens of KV.
    """

    def __init__(self, model: LoadedModel, *, requests: int = 8, context: int = 2048) -> None:
        geometry = probe_geometry(model, BLOCK_TOKENS)
        blocks = -(-context // BLOCK_TOKENS)
        pool = KVPool(geometry, requests * blocks, dtype=model.kv_dtype, device="cuda")
        for part in pool.parts:
            part.normal_()
        self.requests, self.context = requests, context
        self._runner = Runner(model, pool)
        slots = np.arange(requests * blocks, dtype=np.int32).reshape(requests, blocks)
        self._chunks = [Chunk(np.array([5]), context - 1, row) for row in slots]
        for _ in range(_WARM_UPS):
            self._runner.forward(self._chunks)
        self._graph = self._captured()

    def _captured(self) -> torch.cuda.CUDAGraph:
        """The step's work on the device, without what the host does before it."""
        packed = self._runner._pack(self._chunks)  # pyright: ignore[reportPrivateUsage]
        packed = replace(packed, tokens=packed.tokens.cuda(), positions=packed.positions.cuda())
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            self._runner._run(packed, packed.last_rows)  # pyright: ignore[reportPrivateUsage]
        self._read = packed  # its tensors are read by every replay
        return graph

    def replay_ms(self) -> float:
        """Milliseconds of one step as a graph, of the device's time and nothing of the host's."""
        return device_ms(self._graph.replay)

    def eager_ms(self) -> float:
        """The same launched kernel by kernel, as the engine does."""
        return device_ms(lambda: self._runner.forward(self._chunks))


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
