"""A server over a tiny random model, on a real socket, in a thread of the test's process."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import openai
import torch
import transformers
from byte_tokens import byte_tokenizer

from forebay.engine.engine import Engine
from forebay.engine.models import LoadedModel, adopt_model
from forebay.engine.settings import EngineSettings
from forebay.server.run import Server
from forebay.server.settings import ServerSettings

TEMPLATE = """{% if tools %}<|tools|>{{ tools | tojson }}
{% endif %}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% if m.tool_calls %}\
{% for c in m.tool_calls %}[{{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}\
{% endif %}
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def tiny_model(context_tokens: int = 2048, layers: int = 2) -> LoadedModel:
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=context_tokens,
        initializer_range=0.3,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return adopt_model(model, tokenizer, name="tiny")


class Served:
    """A running server and its clients."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._thread = server.front._thread
        self.thread = threading.Thread(target=server.run, daemon=True)

    @property
    def engine(self) -> Any:
        return self._thread._engine

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def port(self) -> int:
        return self.server.socket.getsockname()[1]

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        options = {"max_retries": 0, "timeout": 30.0} | options
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **options)

    def async_client(self, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30.0
        )

    def until_idle(self, timeout_s: float = 10.0) -> None:
        """Wait until the engine holds no request and no block is leased."""
        until(self._idle, timeout_s)

    def _idle(self) -> bool:
        stats = self.server.front.stats
        pools = stats.occupancy
        leased = pools.device_slots - pools.device_free - pools.device_idle
        return not stats.running and not stats.waiting and not leased


def until(holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end_s, "it did not come to hold in time"
        time.sleep(0.01)


@contextmanager
def serving(model: LoadedModel, settings: ServerSettings, engine: EngineSettings) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        served = Served(Server(Engine(model, engine), settings))
    served.thread.start()
    until(lambda: served.server.started)
    try:
        yield served
    finally:
        served.server.should_exit = True
        served.thread.join(20)
        assert not served.thread.is_alive()
