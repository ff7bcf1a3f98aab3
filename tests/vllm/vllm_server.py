"""`vllm serve` as the documentation starts it, over a tiny model, and what its clients do."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

PAGES = Path(__file__).resolve().parents[2] / "docs"
TINY = (
    "--dtype float32 --enforce-eager --max-model-len 512 --block-size 32 --max-num-seqs 2 "
    "--num-gpu-blocks-override 64 --enable-prompt-tokens-details --host 127.0.0.1"
)
SHARED = "/dev/shm/"
_START_S = 150.0
_NEWS_S = 20.0


def commands(beginning: str) -> list[str]:
    """The words of the documentation's one command that begins so."""
    return shlex.split(shell(beginning).replace("\\\n", " "))


def shell(beginning: str) -> str:
    """The documentation's one block of commands that begins so."""
    pages = "".join((PAGES / name).read_text() for name in ("vllm.md", "vllm-figures.md"))
    blocks = re.findall(r"^```sh\n(.*?)^```$", pages, re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if block.startswith(beginning)]
    return found


def vllm(*arguments: str) -> list[str]:
    """The command `vllm` with these arguments."""
    return [sys.executable, str(Path(__file__).with_name("vllm_cli.py")), *arguments]


def environment() -> dict[str, str]:
    """What its processes have: vLLM as everybody runs it, and its paths for operators."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_SERVER_DEV_MODE": "1",
    }


def documented(model: Path, **extra: Any) -> list[str]:
    """The documentation's command for `model`; `extra` are options of the connector."""
    words = commands("vllm serve MODEL")
    place = words.index("--kv-transfer-config") + 1
    config = json.loads(words[place])
    config["kv_connector_extra_config"].update(extra)
    words[place] = json.dumps(config)
    return vllm("serve", str(model), *words[3:])


class VllmServer:
    """A server that is up; its log goes to a file in `folder`."""

    def __init__(self, command: list[str], folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.model = command[3]
        self._log = folder / "vllm.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *TINY.split(), "--port", str(port)],
                env=environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)
        try:
            until(self._is_up, _START_S)
        except BaseException:
            self.kill()
            raise AssertionError(f"vLLM does not start: {self.log()[-4000:]}") from None

    def log(self) -> str:
        """What it said."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def ask(self, prompt: str, answer: int = 8, **forebay: Any) -> Any:
        """A completion; `forebay` is what the request asks of the cache."""
        params = {"kv_transfer_params": {"forebay": forebay}} if forebay else {}
        return self.client.completions.create(
            model=self.model,
            prompt=prompt,
            max_tokens=answer,
            temperature=0,
            extra_body={"ignore_eos": True, **params},
        )

    def reset(self) -> None:
        """Empty vLLM's own prefix cache."""
        until(lambda: self.post("/reset_prefix_cache")["success"], _NEWS_S)

    def post(self, path: str) -> Any:
        """What one of vLLM's own paths for operators answers."""
        request = urllib.request.Request(self.url + path, method="POST", data=b"")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def metrics(self) -> dict[str, dict[str, float]]:
        """Each sample's value, by its name and the value of the label that is not vLLM's."""
        found: dict[str, dict[str, float]] = {}
        for family in self.families().values():
            for sample in family.samples:
                own = [v for k, v in sample.labels.items() if k not in ("engine", "model_name")]
                found.setdefault(sample.name, {})["/".join(own)] = sample.value
        return found

    def families(self) -> dict[str, Any]:
        """What `/metrics` shows, as Prometheus' own parser reads it."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=20) as answer:
            text = answer.read().decode()
        return {family.name: family for family in text_string_to_metric_families(text)}

    def value(self, name: str, label: str = "") -> float:
        """One sample's value; 0 where it is not there."""
        return self.metrics().get(name, {}).get(label, 0.0)

    def processes(self) -> list[int]:
        """The server's processes that have not ended."""
        return [int(each.name) for each in Path("/proc").glob("[0-9]*") if self._is_ours(each)]

    def shared(self) -> set[Path]:
        """Files of shared memory that its processes have mapped."""
        found: set[Path] = set()
        for pid in self.processes():
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {Path(line.split()[-1]) for line in lines if SHARED in line}
        return found

    def end(self) -> int:
        """Ask it to end, as service managers do. Returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def kill(self) -> None:
        """End all that is left of it."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait(20)

    def _is_ours(self, place: Path) -> bool:
        try:
            fields = (place / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            return False
        return fields[0] != "Z" and int(fields[3]) == self.process.pid

    def _is_up(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"it ended with {self.process.returncode}")
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False


def until(true: Callable[[], bool], seconds: float = _NEWS_S) -> None:
    """Wait until something is true; it has to become so."""
    end_s = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end_s, "it did not come"
        time.sleep(0.1)
