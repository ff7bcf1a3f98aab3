"""From logits to tokens, so that a request continues the same after preemption.

The random number for token i of a request comes from a counter, not from a generator that advances:
it depends on (seed, i) alone. So the token depends on (parameters, tokens so far, logits), however
often the request was interrupted in between and whatever ran beside it.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.bounds import shown
from forebay.errors import ModelError, RequestError

MAX_LOGPROBS = 20
"""Most alternatives that may be asked for per token, as in OpenAI's API."""

MAX_BIAS = 100.0
"""Largest bias of a token's logit, either way, as in OpenAI's API."""

_GREEDY_BELOW = 1e-5
_MOST = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request is continued, and when it ends. Checked when made: raises RequestError.

    `temperature` below 1e-5 is greedy. `seed` None draws one per request. `top_k` 0, `top_p` 1 and
    `min_p` 0 switch that filter off.
    `presence_penalty` and `frequency_penalty` count the tokens generated, `repetition_penalty`
    (1: off) those of the prompt too. `logit_bias` adds up to 100 to the logits of tokens, or takes
    as much away, before the penalties. Nothing ends an answer before `min_tokens`: the tokens that
    would are not drawn, and stop strings count only where they end in text of a later token.
    `logprobs` alternatives are reported for every token, None for no log-probabilities at all; they
    are of the model's logits, before all of this.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float], hash=False)
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check_range("max_tokens", 1, _MOST)
        self._check_range("min_tokens", 0, _MOST)
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is more than the {self.max_tokens} of max_tokens"
            )
        self._check_range("temperature", 0.0, 100.0)
        self._check_range("top_p", 0.0, 1.0)
        self._check_range("top_k", 0, _MOST)
        self._check_range("min_p", 0.0, 1.0)
        if self.seed is not None:
            self._check_range("seed", 0, 2**64 - 1)
        self._check_range("presence_penalty", -2.0, 2.0)
        self._check_range("frequency_penalty", -2.0, 2.0)
        self._check_range("repetition_penalty", 0.01, 100.0)
        if self.top_p == 0.0:
            raise RequestError("top_p must be above 0; temperature 0 is greedy")
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise RequestError("stop must be a tuple of strings that are not empty")
        self._check_bias()
        if self.logprobs is not None:
            self._check_range("logprobs", 0, MAX_LOGPROBS)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < _GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the tokens so far."""
        added = self.presence_penalty or self.frequency_penalty
        return bool(added) or self.repetition_penalty != 1.0

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError("logit_bias must be a mapping of token ids to biases")
        for token_id, bias in self.logit_bias.items():
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise RequestError(f"logit_bias must name tokens by id, not {shown(token_id)}")
            if isinstance(bias, bool) or not isinstance(bias, (int, float)):
                raise RequestError(f"a bias must be a number, not {shown(bias)}")
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise RequestError(f"a bias must be in -100..100, not {shown(bias)}")

    def _check_range(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        whole = isinstance(low, int)
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise RequestError(f"{name} must be a {'whole ' if whole else ''}number, not {value!r}")
        if not low <= value <= high:
            range_ = f"{low} or more" if high == _MOST and not value > high else f"in {low}..{high}"
            raise RequestError(f"{name} must be {range_}, not {shown(value)}")


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token drawn.

    `gap` is the distance of the two best adjusted logits: below about 1e-3 another order of
    summation could have chosen the other one. `logprob` and `alternatives` (token id,
    log-probability; best first) only if the request asked for them.
    """

    token_id: int
    gap: float
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


class Sampler:
    """The sampling state of one request. It outlives preemption: keep it, change nothing.

    Counts tokens as it draws them, or as they are fed back by :meth:`accept`. `ending` are the
    tokens that end an answer.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: NDArray[np.int64],
        ending: AbstractSet[int] = frozenset(),
    ) -> None:
        self.params = params
        self._ending = np.array(sorted(ending) if params.min_tokens else [], np.int64)
        self._biased = np.array(list(params.logit_bias), np.int64)
        self._biases = np.array(list(params.logit_bias.values()), np.float32)
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self.position = 0
        """Tokens drawn so far."""
        self._prompt = np.unique(prompt_ids) if params.repetition_penalty != 1.0 else None
        self._counts: dict[int, int] = {}

    def accept(self, token_id: int) -> None:
        """Takes note of a token as if it had been drawn, e.g. one that was forced."""
        self.position += 1
        if self.params.penalised:
            self._counts[token_id] = self._counts.get(token_id, 0) + 1

    @property
    def adjusts(self) -> bool:
        """Whether the next token is not drawn from the model's logits as they are."""
        return bool(self.params.penalised or len(self._biased) or self._must_go_on)

    @property
    def _must_go_on(self) -> bool:
        return bool(self.position < self.params.min_tokens and len(self._ending))

    def adjusted(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits` ``[vocab]`` with bias and penalties, without what must not end the answer yet.

        The input is kept. Ids beyond the vocabulary are left out.
        """
        if not self.adjusts:
            return logits
        logits = logits.clone()
        if len(self._biased):
            known = self._biased < len(logits)
            index = torch.from_numpy(self._biased[known]).to(logits.device)
            logits[index] += torch.from_numpy(self._biases[known]).to(logits.device)
        if self._must_go_on:
            known = (self._ending >= 0) & (self._ending < len(logits))
            logits[torch.from_numpy(self._ending[known]).to(logits.device)] = -torch.inf
        return self._penalised(logits) if self.params.penalised else logits

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        """Changes `logits`: the penalties of the tokens so far."""
        params = self.params
        seen = np.fromiter(self._counts, dtype=np.int64, count=len(self._counts))
        if self._prompt is not None:
            both = torch.from_numpy(np.union1d(seen, self._prompt)).to(logits.device)
            old = logits[both]
            by = params.repetition_penalty
            logits[both] = torch.where(old > 0, old / by, old * by)
        if len(seen):
            counts = torch.tensor(list(self._counts.values()), device=logits.device)
            index = torch.from_numpy(seen).to(logits.device)
            logits[index] -= params.presence_penalty + params.frequency_penalty * counts
        return logits

    def draw(self, logits: torch.Tensor) -> int:
        """A token from adjusted float32 `logits` ``[vocab]`` at the current position.

        Filters in the order top_k, min_p, top_p, each over what the one before left.
        """
        params = self.params
        scaled = logits.cpu().numpy().astype(np.float64) / params.temperature
        weights = np.exp(scaled - scaled.max())
        ids = _likeliest(weights, params.top_k)
        ids = ids[weights[ids] >= params.min_p]
        if params.top_p < 1.0:
            ids = _nucleus(weights, ids, params.top_p)
        sums = np.cumsum(weights[ids])
        point = uniform(self.seed, self.position) * sums[-1]
        return int(ids[min(int(np.searchsorted(sums, point, side="right")), len(ids) - 1)])


def sample(samplers: Sequence[Sampler], logits: torch.Tensor) -> list[SampledToken]:
    """Draws the next token of each request; row i of `logits` float32 ``[n, vocab]`` is its own.

    Advances the samplers. Raises ModelError naming the row if a row has no finite maximum; nothing
    has been drawn then.
    """
    changed = [i for i, sampler in enumerate(samplers) if sampler.adjusts]
    final = logits
    if changed:
        final = logits.clone()
        for i in changed:
            final[i] = samplers[i].adjusted(logits[i])
    best, best_ids = (t.tolist() for t in final.topk(2, dim=1))
    for i, (top, _) in enumerate(best):
        if not math.isfinite(top):
            raise ModelError(f"the logits of row {i} have no finite maximum: the model is broken")
    drawn: list[SampledToken] = []
    for i, sampler in enumerate(samplers):
        token_id = best_ids[i][0] if sampler.params.greedy else sampler.draw(final[i])
        sampler.accept(token_id)
        logprob, alternatives = _logprobs(logits[i], token_id, sampler.params.logprobs)
        drawn.append(SampledToken(token_id, best[i][0] - best[i][1], logprob, alternatives))
    return drawn


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of the token at `position`, from the counter-based Philox."""
    raw = np.random.Philox(key=seed, counter=position).random_raw()
    return (int(raw) >> 11) * 2.0**-53


def _likeliest(weights: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Ids of the `count` greatest weights, of equal ones the lower ids; 0 is all."""
    if count == 0 or count >= len(weights):
        return np.arange(len(weights))
    least = np.partition(weights, -count)[-count]
    ids = np.flatnonzero(weights >= least)
    return ids[np.argsort(-weights[ids], kind="stable")[:count]]


def _nucleus(
    weights: NDArray[np.float64], ids: NDArray[np.int64], share: float
) -> NDArray[np.int64]:
    """The fewest of `ids`, likeliest first, that hold `share` of their weight."""
    total = weights[ids].sum()
    # All that weigh less than this have too little together to reach into the nucleus: most of a
    # vocabulary need not be sorted.
    ids = ids[weights[ids] >= (1.0 - share) * total / len(ids)]
    ids = ids[np.argsort(-weights[ids], kind="stable")]
    return ids[: int(np.searchsorted(np.cumsum(weights[ids]), share * total)) + 1]


def _logprobs(
    logits: torch.Tensor, token_id: int, count: int | None
) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    if count is None:
        return None, ()
    logprobs = torch.log_softmax(logits, dim=0)
    values, ids = (t.tolist() for t in logprobs.topk(count)) if count else ([], [])
    return float(logprobs[token_id]), tuple(zip(ids, values, strict=True))
