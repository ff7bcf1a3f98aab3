"""The paged runner against plain `generate`, over memory that must not be looked at."""

import numpy as np
import pytest
import torch

from forebay.engine.models import adopt_model
from forebay.engine.pool import KVPool
from forebay.engine.runner import Chunk, Runner, probe_geometry
from forebay.engine.text import chat_prompt
from forebay.errors import ModelError, RequestError

FAMILIES = ["llama", "qwen3", "gpt_neox", "gpt2", "mixtral", "qwen3_moe", "deepseek_v3"]
BLOCK_TOKENS = 8
SLOTS = 64


def make_runner(loaded, *, slots=SLOTS, block_tokens=BLOCK_TOKENS):
    pool = KVPool(probe_geometry(loaded, block_tokens), slots, dtype=loaded.kv_dtype)
    pool.fill_poison()
    return Runner(loaded, pool)


def tables(prompts, steps, *, seed=0, slots=SLOTS):
    """A block table per prompt, over slots in random order."""
    free = list(np.random.default_rng(seed).permutation(slots))
    need = [-(-(len(p) + steps) // BLOCK_TOKENS) for p in prompts]
    return [np.array([free.pop() for _ in range(n)], dtype=np.int32) for n in need]


def run_staggered(runner, prompts, block_tables, steps, chunk_tokens):
    """Greedy tokens of each prompt: request i joins at step i, prefills in chunks, then decodes."""
    tokens = [list(map(int, p)) for p in prompts]
    done = [0] * len(prompts)
    wanted = [len(p) + steps for p in prompts]
    step = 0
    while any(len(t) < w for t, w in zip(tokens, wanted, strict=True)):
        active = [i for i in range(min(step + 1, len(prompts))) if len(tokens[i]) < wanted[i]]
        chunks = []
        for i in active:
            ids = np.array(tokens[i][done[i] : done[i] + chunk_tokens], dtype=np.int64)
            chunks.append(Chunk(ids, done[i], block_tables[i]))
        logits = runner.forward(chunks)
        for i, chunk, row in zip(active, chunks, logits, strict=True):
            done[i] = chunk.length
            if done[i] == len(tokens[i]):
                tokens[i].append(int(row.argmax()))
        step += 1
    return [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_beside_decode_gives_the_tokens_of_generate(
    family, tiny_model, plain_generate, random_prompts
):
    loaded = tiny_model(family)
    prompts = random_prompts([37, 5, 90, 16, 1])
    runner = make_runner(loaded)
    got = run_staggered(runner, prompts, tables(prompts, 10), 10, chunk_tokens=16)
    assert got == [plain_generate(loaded, p, 10) for p in prompts]


def test_slots_and_what_they_held_before_do_not_change_one_bit(tiny_model, random_prompts):
    loaded = tiny_model("llama")
    prompts = random_prompts([40, 9, 23, 70])
    logits = []
    for seed in range(3):
        runner = make_runner(loaded)
        if seed == 1:
            runner.pool.parts[0].uniform_(-9, 9)
        table = tables(prompts, 1, seed=seed)
        runner.forward([Chunk(p[:-3], 0, t) for p, t in zip(prompts, table, strict=True)])
        last = [Chunk(p[-3:-1], len(p) - 3, t) for p, t in zip(prompts, table, strict=True)]
        runner.forward(last[:2])
        mixed = [Chunk(p[-1:], len(p) - 1, t) for p, t in zip(prompts[:2], table[:2], strict=True)]
        logits.append(runner.forward([*mixed, *last[2:]]))
    assert all(torch.equal(logits[0], other) for other in logits[1:])
    assert torch.isfinite(logits[0]).all()


def test_only_the_places_of_the_chunk_are_written(tiny_model, random_prompts):
    runner = make_runner(tiny_model("llama"))
    runner.pool.parts[0].fill_(3.0)
    (prompt,) = random_prompts([20])
    slots = np.array([9, 4, 30], dtype=np.int32)
    runner.forward([Chunk(prompt[:12], 0, slots)])
    touched = {int(s) for s in (runner.pool.parts[0] != 3.0).any(1).nonzero()}
    assert touched == {9, 4}
    for view in (*runner.pool.keys, *runner.pool.values):
        assert bool((view[4, 4:] == 3.0).all())
        assert not bool((view[4, :4] == 3.0).all())


def test_rows_come_in_the_callers_order(tiny_model, random_prompts):
    loaded = tiny_model("qwen3")
    prompts = random_prompts([9, 30, 1, 17])
    table = tables(prompts, 1)
    chunks = [Chunk(p, 0, t) for p, t in zip(prompts, table, strict=True)]
    alone = torch.cat([make_runner(loaded).forward([c]) for c in chunks])
    together = make_runner(loaded).forward(chunks)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


def test_long_and_short_decodes_in_one_step(tiny_model, plain_generate, random_prompts):
    loaded = tiny_model("llama")
    prompts = random_prompts([300, 3, 290, 120, 8])
    table = tables(prompts, 4, slots=128)
    runner = make_runner(loaded, slots=128)
    got = run_staggered(runner, prompts, table, 4, chunk_tokens=512)
    assert got == [plain_generate(loaded, p, 4) for p in prompts]


def test_forward_all_gives_every_tokens_logits(tiny_model, random_prompts):
    loaded = tiny_model("llama")
    prompts = random_prompts([12, 7])
    table = tables(prompts, 0)
    chunks = [Chunk(p, 0, t) for p, t in zip(prompts, table, strict=True)]
    every = make_runner(loaded).forward_all(chunks)
    assert [tuple(rows.shape) for rows in every] == [(12, 320), (7, 320)]
    last = make_runner(loaded).forward(chunks)
    torch.testing.assert_close(torch.stack([rows[-1] for rows in every]), last)


def test_chunks_that_cannot_be_are_refused_before_anything_is_written(tiny_model):
    loaded = tiny_model("llama")
    runner = make_runner(loaded)
    ids, slots = np.arange(3, 13), np.array([0, 1], dtype=np.int32)
    good = Chunk(ids, 0, slots)
    bad = {
        "at least one chunk": None,
        "at least one token": Chunk(ids[:0], 0, slots),
        "do not cover": Chunk(ids, 8, slots),
        "context of 512": Chunk(ids, 510, np.arange(65, dtype=np.int32) % SLOTS),
        "token ids": Chunk(np.array([320]), 0, slots),
        "slots must be": Chunk(ids, 0, np.array([0, SLOTS], dtype=np.int32)),
    }
    for reason, chunk in bad.items():
        with pytest.raises(RequestError, match=reason):
            runner.forward([] if chunk is None else [good, chunk])
    assert bool(torch.isnan(runner.pool.parts[0]).all())
    assert torch.isfinite(runner.forward([good])).all()


def test_a_pool_of_another_model_is_refused(tiny_model):
    pool = KVPool(probe_geometry(tiny_model("gpt2"), BLOCK_TOKENS), 4)
    with pytest.raises(ModelError, match="another model"):
        Runner(tiny_model("llama"), pool)


def test_latent_attention_has_values_narrower_than_keys(tiny_model):
    geometry = probe_geometry(tiny_model("deepseek_v3"), BLOCK_TOKENS)
    assert (geometry.layers[0].key_dim, geometry.layers[0].value_dim) == (24, 12)


def test_sixteen_bit_stays_close_to_thirty_two(build_model, tiny_model, random_prompts):
    half = adopt_model(build_model("llama").to(torch.bfloat16), name="half")
    prompts = random_prompts([40, 17])
    table = tables(prompts, 0)
    logits = []
    for loaded in (half, tiny_model("llama")):
        runner = make_runner(loaded)
        runner.forward([Chunk(p[:-1], 0, t) for p, t in zip(prompts, table, strict=True)])
        last = [Chunk(p[-1:], len(p) - 1, t) for p, t in zip(prompts, table, strict=True)]
        logits.append(torch.log_softmax(runner.forward(last), dim=1))
    assert logits[0].dtype == torch.float32
    assert float((logits[1].exp() * (logits[1] - logits[0])).sum(1).mean()) < 0.05


def test_smollm2_answers_like_generate(smollm2, plain_generate):
    questions = ["What is the capital of France?", "Name a colour."]
    prompts = [
        chat_prompt(smollm2.tokenizer, [{"role": "user", "content": text}]) for text in questions
    ]
    runner = make_runner(smollm2)
    got = run_staggered(runner, prompts, tables(prompts, 7), 7, chunk_tokens=24)
    assert got == [plain_generate(smollm2, p, 7) for p in prompts]
    assert "Paris" in smollm2.tokenizer.decode(got[0])
