"""What engines over vLLM's real scheduler and block pool share, whatever their model is."""

from __future__ import annotations

import copy
from typing import Any

from vllm import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request


class RealScheduler:
    """Ways to what is inside of `scheduler`."""

    scheduler: Any

    @property
    def half(self) -> Any:
        """Our half in the scheduler."""
        return self.scheduler.connector.scheduler_half

    @property
    def pool(self) -> Any:
        """vLLM's block pool."""
        return self.scheduler.kv_cache_manager.block_pool


def request_of(
    name: str, prompt: list[int], most: int, params: dict[str, Any] | None, **more: Any
) -> Request:
    """A request for `most` tokens; `params` are its `kv_transfer_params`."""
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(
            max_tokens=most,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params else None,
        ),
        pooling_params=None,
        **more,
    )


def output_of(names: list[str], sampled: list[list[int]], news: Any) -> ModelRunnerOutput:
    """What a worker answers to a step of the requests `names`: their tokens, and `news`.

    As in vLLM, a step without requests brings no news that is empty.
    """
    if not names:
        # vLLM's workers send theirs to another process: none has the one that all share.
        return copy.copy(ModelRunnerOutput.with_kv_conn_output_only(news))
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: place for place, name in enumerate(names)},
        sampled_token_ids=sampled,
        kv_connector_output=news,
    )
