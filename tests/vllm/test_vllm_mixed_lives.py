"""Random lives in which everything is asked for beside everything else.

LoRAs that are replaced, salts, hints, answers that stop early, prompts that must not read the
cache, priorities, pauses, resets, the off switch, aborts, and a link that stops, in workers of all
kinds.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")

from test_vllm_idle_lives import check_counts, next_prompt, settings, stop_for_a_while
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.interface import PauseState
from vllm_toy import ToyEngine, answers, assert_nothing_left, prompt_of
from vllm_toy_bytes import Watched
from vllm_toy_stages import StagedEngine

from forebay.transfer.messages import Direction
from forebay.vllm import worker

STEPS = 250
RATES = {
    "abort": 0.05,
    "reset": 0.06,
    "reset both": 0.02,
    "reset host": 0.005,
    "stop": 0.04,
    "switch": 0.02,
    "pause": 0.03,
    "replace": 0.03,
}
"""How likely each is to happen at a step, at most."""


class Life:
    """What happens to `engine`, by `dice`."""

    def __init__(self, engine: ToyEngine, dice: random.Random, mode_file: Path) -> None:
        self._engine, self._dice, self._mode_file = engine, dice, mode_file
        self._rates = {name: rate * dice.choice([0.0, 0.3, 1.0]) for name, rate in RATES.items()}
        self._crowd = dice.choice([0.05, 0.12, 0.3])
        self._loras = [LoRARequest(name, number, "p") for number, name in ((1, "a"), (2, "b"))]
        self._with_loras = dice.random() < 0.5
        self._last_lora = 2
        self._timers: list[threading.Timer] = []
        self._lengths: dict[str, int] = {}

    @property
    def replaced(self) -> bool:
        """Whether a name stood for two LoRAs: what is in a block does not follow from its hash."""
        return self._last_lora > len(self._loras)

    def step(self) -> None:
        """One step of the engine, and what happens before."""
        engine = self._engine
        idle = not engine.scheduler.has_requests() and not engine._scheduled
        if self._dice.random() < (0.7 if idle else self._crowd) and len(list(engine.open())) < 20:
            self._arrive()
        for name, rate in self._rates.items():
            if self._dice.random() < rate:
                self._happen(name)
        engine.step()

    def end(self) -> None:
        """Let it come to its end, and see that nothing is left and no token is wrong."""
        engine = self._engine
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        self._switch(None)
        for timer in self._timers:
            timer.join()
        engine.run()
        engine.half._hints.drop_all()
        for name, asked in engine.asked.items():
            right = answers(asked.prompt, self._lengths[name], asked.first)
            assert asked.given == right[: len(asked.given)], name
            assert asked.ended == "aborted" or len(asked.given) == len(right), name
        assert_nothing_left(engine)

    def _arrive(self) -> None:
        """Some that begin alike. A hint is over within the steps that a run may take."""
        dice = self._dice
        prompt = next_prompt(self._engine, dice)[:330]
        lora = dice.choice([None, *self._loras]) if self._with_loras else None
        salt = dice.choice([None] * 5 + ["s"])
        for _ in range(dice.choice([1, 1, 1, 1, 2, 3, 5])):
            hint = {"hint": {"eta_s": dice.choice([0.0, 0.01, 100.0]), "expiry_s": 0.1}}
            neither = {"no_save": True, "no_cache": True}
            wishes = dice.choice(
                [None] * 8 + [{"no_save": True}, {"no_cache": True}, neither, hint]
            )
            most = 1 if wishes is hint else dice.choice([1, 1, 2, *dice.sample(range(1, 30), 2)])
            asked = self._engine.ask(
                prompt,
                most,
                priority=dice.randrange(3),
                params=None if wishes is None else {"forebay": wishes},
                lora_request=lora,
                cache_salt=salt,
                reads=dice.random() < 0.9,
            )
            told = answers(prompt, most, asked.first)
            if dice.random() < 0.2:
                token = dice.choice(told)
                most = told.index(token) + 1
                asked.request.sampling_params.stop_token_ids = [token]
            self._lengths[asked.request.request_id] = most
            if dice.random() < 0.3:
                prompt = prompt + prompt_of(dice.randrange(9), dice.choice([1, 15, 16, 17]))

    def _happen(self, name: str) -> None:
        dice, engine = self._dice, self._engine
        scheduler = engine.scheduler
        if name == "abort":
            opened = list(engine.open())
            for each in dice.sample(opened, dice.randrange(1 + len(opened))):
                engine.abort(engine.asked[each])
        elif name == "reset":
            engine.try_to_reset()
        elif name == "reset both":
            scheduler.reset_prefix_cache(reset_connector=True)
        elif name == "reset host":
            scheduler.reset_connector_cache()
        elif name == "stop":
            self._timers.append(stop_for_a_while(engine, dice))
        elif name == "switch":
            self._switch(dice.choice(["b0", "b3", "b4", "b4", "nonsense", None]))
        elif name == "pause":
            states = PauseState.PAUSED_ALL, PauseState.PAUSED_NEW, PauseState.UNPAUSED
            scheduler.set_pause_state(dice.choice(states))
        elif self._with_loras:
            self._replace()

    def _switch(self, mode: str | None) -> None:
        self._engine.half._mode_file._next_s = 0.0
        if mode is None:
            self._mode_file.unlink(missing_ok=True)
        else:
            self._mode_file.write_text(mode)

    def _replace(self) -> None:
        """As an operator should: when nobody uses it, and with a reset of vLLM's own cache."""
        engine, place = self._engine, self._dice.randrange(2)
        name = self._loras[place].lora_name
        loras = [engine.asked[each].request.lora_request for each in engine.open()]
        if engine._scheduled or name in [each.lora_name for each in loras if each is not None]:
            return
        if engine.scheduler.reset_prefix_cache():
            self._last_lora += 1
            self._loras[place] = LoRARequest(name, self._last_lora, "p")


@pytest.mark.parametrize("seed", range(24))
def test_mixed_lives(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int):
    monkeypatch.setattr(worker, "_AWAIT_S", 0.05)
    live(tmp_path, tiny_llama, seed)


def test_the_kv_of_another_lora_is_noticed(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The mutant: hashes of blocks do not have names of LoRAs in them."""
    monkeypatch.setattr("vllm.v1.core.kv_cache_utils._gen_lora_extra_hash_keys", lambda request: [])

    def all_lives() -> None:
        for seed in range(8):
            live(tmp_path, tiny_llama, seed)

    with pytest.raises(AssertionError):
        all_lives()


def live(folder: Path, model: Path, seed: int) -> None:
    """One life, of an engine and with options by `seed`."""
    dice = random.Random(seed)
    mode_file = folder / f"mode {seed}"
    options: dict[str, Any] = settings(dice) | {"loras": True, "mode_file": str(mode_file)}
    if dice.random() < 0.25:
        stages = dice.choice([2, 3])
        options |= {"lag": dice.choice([0, 1]), "stages": stages, "seed": seed}
        options["host_bytes"] *= 3
        del options["ranks"]
        engine: ToyEngine = StagedEngine(model, **options)
    else:
        engine = ToyEngine(model, **options)
        engine.scheduler.use_v2_model_runner = dice.random() < 0.3
    engine.scheduler.scheduler_config.long_prefill_token_threshold = dice.choice([0, 0, 16, 33])
    engine.scheduler.lora_config.max_loras = engine.half._loras._most = dice.choice([1, 2])
    life, watched = Life(engine, dice, mode_file), Watched(engine)
    faults = [dice.randrange(STEPS) for _ in range(dice.choice([0, 2]))]
    try:
        for step in range(STEPS):
            if step in faults:
                engine.mover.fail_window(dice.choice(list(Direction)), dice.randrange(10))
            life.step()
            check_counts(engine)
            watched.check_books()
            if not life.replaced and not isinstance(engine, StagedEngine):
                watched.check_device()
                watched.check_host()
        life.end()
    finally:
        engine.close()
