"""Two engines in one process: vLLM has one connector there for the workers of both."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make vllm` does it")

from vllm_toy import (
    BLOCK_BYTES,
    MakeEngine,
    ToyEngine,
    assert_nothing_left,
    prompt_of,
    wrong_answers,
)
from vllm_toy_config import name_of

from forebay.errors import SettingsError


def take_over(earlier: ToyEngine, engine: ToyEngine) -> None:
    """vLLM leaves the worker of the one to the other, and makes the scheduler of that later."""
    engine.worker.shutdown()
    engine.workers = earlier.workers
    connector, engine.scheduler.connector._pair.mark = engine.scheduler.connector, ""
    engine.worker.register_kv_caches({name_of(0): engine.kv[0]})
    connector._pair.decided_by(connector.scheduler_half)
    connector._mark = connector._pair.mark


def test_a_worker_that_the_next_engine_of_the_process_takes_over_answers_that_one(
    toy: MakeEngine,
):
    earlier = toy()
    earlier.ask(prompt_of(1, 200), 4)
    earlier.run()
    engine = toy()
    take_over(earlier, engine)
    # What the earlier one decides from now on must not come to blocks of the other.
    earlier.ask(prompt_of(1, 200), 4)
    for _ in range(2):
        with pytest.raises(SettingsError, match=r"KV cache of a later one.* in one of its own"):
            earlier.step()
    earlier.workers = []
    engine.ask(prompt_of(1, 200), 4)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    engine.ask(prompt_of(1, 200), 4)
    engine.run()
    assert not wrong_answers(engine)
    assert engine.half.stats().loaded_bytes == 12 * BLOCK_BYTES
    assert_nothing_left(engine)


@pytest.mark.parametrize("host_blocks", [10, 1000])
def test_a_worker_of_another_size_is_not_taken_over(toy: MakeEngine, host_blocks: int):
    earlier, engine = toy(), toy(host_bytes=host_blocks * BLOCK_BYTES)
    take_over(earlier, engine)
    earlier.workers = []
    engine.ask(prompt_of(1, 200), 4)
    with pytest.raises(SettingsError, match="sizes of an earlier one"):
        engine.step()
