"""The server that `serve.py` measures, in a process of its own.

The first line it writes is the server's port. From then on it answers each line of JSON that it
reads with one: null with the clocks and sizes of now, prompts with the seconds in which an engine
of the same kind answers them without HTTP. It ends with its input.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

# First, because it sets how OpenMP threads wait.
from forebay.engine.models import SMOLLM2, LoadedModel, adopt_model, load_model  # isort: skip

import torch
import transformers

from forebay.cli.garbage import few_collections, keep_out
from forebay.config import BatchSettings
from forebay.engine.engine import Engine
from forebay.engine.models import smollm2_folder
from forebay.engine.sampler import SamplingParams
from forebay.engine.settings import EngineSettings
from forebay.server.run import Server
from forebay.server.settings import ServerSettings

TINY = "tiny"
_HTTP_THREADS = ("MainThread", "forebay-prompts")


def tiny_model() -> LoadedModel:
    """Two small random layers behind SmolLM2's tokenizer: a step takes milliseconds."""
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        initializer_range=0.3,
        eos_token_id=2,
    )
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(smollm2_folder())
    return adopt_model(transformers.LlamaForCausalLM(config), tokenizer, name=TINY)


class StepClock:
    """The CPU time that the engine's thread spends in its engine's steps."""

    def __init__(self, engine: Engine) -> None:
        self.seconds = 0.0
        self._step = engine.step
        engine.step = self._timed  # pyright: ignore[reportAttributeAccessIssue]

    def _timed(self) -> Any:
        began_s = time.thread_time()
        try:
            return self._step()
        finally:
            self.seconds += time.thread_time() - began_s


def count(server: Server, steps: StepClock) -> dict[str, float]:
    """`http_s`: CPU of the threads of HTTP, and of the engine's thread outside its steps."""
    http_s = -steps.seconds
    for thread in threading.enumerate():
        wanted = thread.name == "forebay-engine" or thread.name.startswith(_HTTP_THREADS)
        if wanted and thread.ident is not None:
            http_s += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    stats = server.front.stats
    return {
        "http_s": http_s,
        "process_s": time.process_time(),
        "resident_bytes": _resident_bytes(),
        "open": stats.waiting + stats.running,
    }


def _resident_bytes() -> int:
    gc.collect()
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def generate(engine: Engine, work: dict[str, Any]) -> dict[str, float]:
    """Answer `prompts` with `max_tokens` each, without HTTP: the seconds it took."""
    params = SamplingParams(max_tokens=work["max_tokens"], ignore_eos=True)
    began_s = time.perf_counter()
    done = engine.generate(work["prompts"], params)
    seconds = time.perf_counter() - began_s
    return {"seconds": seconds, "tokens": sum(len(request.drawn) for request in done)}


def obey(server: Server, steps: StepClock, direct: Engine | None) -> None:
    """Answer questions until there are no more, then end the server."""
    while not server.started:
        time.sleep(0.01)
    for line in sys.stdin:
        work = json.loads(line)
        if work is None:
            answer = count(server, steps)
        elif direct is not None:
            answer = generate(direct, work)
        else:
            break
        print(json.dumps(answer), flush=True)
    if direct is not None:
        direct.close()
    server.should_exit = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=(TINY, SMOLLM2), default=TINY)
    parser.add_argument("--max-running", type=int, default=16)
    parser.add_argument("--max-waiting", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--direct", action="store_true", help="a second engine for `generate`")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = tiny_model() if options.model == TINY else load_model(SMOLLM2, device="cpu")
    settings = EngineSettings(
        device_tokens=32 * 1024,
        host_bytes=1 << 28,
        batch=BatchSettings(max_running=options.max_running, max_waiting=options.max_waiting),
    )
    engine = Engine(loaded, settings)
    direct = Engine(loaded, settings) if options.direct else None
    steps = StepClock(engine)
    server = Server(engine, ServerSettings(port=0, drain_s=5))
    print(server.socket.getsockname()[1], flush=True)
    threading.Thread(target=obey, args=(server, steps, direct), daemon=True).start()
    with few_collections():
        keep_out()
        server.run()


if __name__ == "__main__":
    main()
