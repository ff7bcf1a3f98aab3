"""Sampling: repeatable whatever happens in between, and distributed as asked."""

import numpy as np
import pytest
import torch

from forebay.engine.sampler import Sampler, SamplingParams, sample, uniform
from forebay.errors import ModelError, RequestError

NO_PROMPT = np.empty(0, dtype=np.int64)
VOCAB = 50


def rows(count, seed=0):
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def drawn(params, logits, prompt=NO_PROMPT):
    sampler = Sampler(params, prompt)
    return [sample([sampler], row[None])[0].token_id for row in logits]


def test_greedy_takes_the_best_and_reports_the_gap():
    logits = torch.tensor([[0.0, 3.0, 2.5], [1.0, 1.0, -9.0]])
    samplers = [Sampler(SamplingParams(), NO_PROMPT) for _ in range(2)]
    first, tie = sample(samplers, logits)
    assert (first.token_id, first.gap) == (1, 0.5)
    assert tie.gap == 0.0
    assert first.logprob is None


def test_the_token_depends_on_seed_position_and_logits_alone():
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=3, frequency_penalty=0.3)
    logits = rows(12)
    expected = drawn(params, logits)
    beside = Sampler(SamplingParams(temperature=1.5, seed=8), NO_PROMPT)
    resumed = Sampler(params, NO_PROMPT)
    for token_id in expected[:5]:
        resumed.accept(token_id)
    got = []
    for row in logits[5:]:
        token, other = sample([resumed, beside], torch.stack([row, row]))
        got.append(token.token_id)
    assert got == expected[5:]
    assert other.token_id != expected[-1] or beside.position == 7
    assert drawn(SamplingParams(temperature=0.9, seed=4), logits) != expected


def test_without_a_seed_requests_differ():
    params = SamplingParams(temperature=1.0)
    logits = torch.zeros(16, VOCAB)
    assert drawn(params, logits) != drawn(params, logits)


def test_random_numbers_are_uniform_and_independent():
    values = np.array([[uniform(seed, i) for i in range(400)] for seed in range(20)])
    assert ((values >= 0) & (values < 1)).all()
    counts = np.histogram(values, bins=10)[0]
    assert counts.min() > 680
    assert counts.max() < 920
    assert abs(np.corrcoef(values[:, :-1].ravel(), values[:, 1:].ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]) < 0.05


def test_draws_follow_the_distribution():
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    params = SamplingParams(temperature=0.7, seed=1)
    sampler = Sampler(params, NO_PROMPT)
    tokens = [sample([sampler], logits[None])[0].token_id for _ in range(4000)]
    share = np.bincount(tokens, minlength=4) / len(tokens)
    expected = torch.softmax(logits / 0.7, dim=0).numpy()
    np.testing.assert_allclose(share, expected, atol=0.025)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(5, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.2), (7, 0.5, 0.05), (1, 1.0, 0.0), (0, 1e-9, 0.0)],
)
def test_filters_keep_what_a_plain_sort_keeps(top_k, top_p, min_p, seed):
    logits = rows(1, seed)[0]
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    sampler = Sampler(params, NO_PROMPT)
    got = {sample([sampler], logits[None])[0].token_id for _ in range(600)}
    weights = torch.softmax(logits.double(), dim=0).numpy()
    order = np.argsort(-weights, kind="stable")[: top_k or VOCAB]
    order = order[weights[order] >= min_p * weights[order[0]]]
    share = np.cumsum(weights[order]) / weights[order].sum()
    allowed = order[: int((share < top_p).sum()) + 1]
    assert got <= set(allowed.tolist())
    assert set(allowed[weights[allowed] > 0.02].tolist()) <= got


def test_top_k_breaks_ties_the_same_way_every_time():
    params = SamplingParams(temperature=1.0, top_k=3, seed=0)
    assert set(drawn(params, torch.zeros(100, VOCAB))) == {0, 1, 2}


def test_penalties_push_down_what_was_said():
    logits = torch.tensor([[2.0, 1.5, 1.0, -1.0]])
    assert drawn(SamplingParams(), logits.expand(3, -1)) == [0, 0, 0]
    assert drawn(SamplingParams(presence_penalty=0.6), logits.expand(3, -1)) == [0, 1, 0]
    assert drawn(SamplingParams(frequency_penalty=0.3), logits.expand(4, -1)) == [0, 0, 1, 0]
    prompt = np.array([0, 0, 3], dtype=np.int64)
    repetition = SamplingParams(repetition_penalty=2.0)
    assert drawn(repetition, logits, prompt) == [1]
    penalised = Sampler(repetition, prompt).adjusted(logits[0])
    assert penalised.tolist() == [1.0, 1.5, 1.0, -2.0]
    assert logits[0].tolist() == [2.0, 1.5, 1.0, -1.0]


def test_bias_and_penalties_add_up_and_log_probabilities_stay():
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    params = SamplingParams(
        logit_bias={0: 2.5, 3: 100.0, 99: 1.0}, presence_penalty=2.0, logprobs=1
    )
    sampler = Sampler(params, NO_PROMPT)
    sampler.accept(3)
    assert sampler.adjusted(logits[0]).tolist() == [3.5, 3.0, 2.0, 97.0]
    assert logits.tolist() == [[1.0, 3.0, 2.0, -1.0]]
    (token,) = sample([sampler], logits)
    assert token.token_id == 3
    assert token.alternatives[0][0] == 1


def test_what_ends_an_answer_is_not_drawn_before_min_tokens():
    logits = torch.tensor([[9.0, 8.0, 1.0, 0.0]])
    for temperature in (0.0, 1.0):
        params = SamplingParams(min_tokens=2, temperature=temperature, seed=1)
        sampler = Sampler(params, NO_PROMPT, {0, 1, 77, -5})
        drawn = [sample([sampler], logits)[0].token_id for _ in range(4)]
        assert set(drawn[:2]) <= {2, 3}
        assert set(drawn[2:]) <= {0, 1}
    assert not Sampler(SamplingParams(), NO_PROMPT, {0}).adjusts


def test_log_probabilities_are_of_the_plain_logits():
    logits = rows(1)
    params = SamplingParams(logprobs=2, presence_penalty=1.0)
    (token,) = sample([Sampler(params, NO_PROMPT)], logits)
    expected = torch.log_softmax(logits[0], dim=0)
    assert token.logprob == pytest.approx(float(expected[token.token_id]))
    assert [i for i, _ in token.alternatives] == expected.topk(2).indices.tolist()


def test_broken_logits_are_reported_and_draw_nothing():
    samplers = [Sampler(SamplingParams(), NO_PROMPT) for _ in range(2)]
    logits = rows(2)
    logits[1, 4] = float("nan")
    with pytest.raises(ModelError, match="row 1"):
        sample(samplers, logits)
    assert samplers[0].position == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"top_k": 2.5},
        {"min_p": 2.0},
        {"max_tokens": 0},
        {"max_tokens": True},
        {"seed": -1},
        {"presence_penalty": 3.0},
        {"repetition_penalty": 0.0},
        {"stop": "text"},
        {"stop": ("",)},
        {"logprobs": 21},
        {"min_tokens": -1},
        {"min_tokens": 3, "max_tokens": 2},
        {"logit_bias": [5]},
        {"logit_bias": {"5": 1.0}},
    ],
)
def test_parameters_that_make_no_sense_are_refused(bad):
    with pytest.raises(RequestError, match=next(iter(bad))):
        SamplingParams(**bad)
