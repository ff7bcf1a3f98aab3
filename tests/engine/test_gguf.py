"""The GGUF reader on small files made here, as llama.cpp lays them out."""

import struct

import numpy as np
import pytest
import torch
import transformers
from tokenizers import pre_tokenizers

from forebay.engine.gguf import read_gguf, write_folder
from forebay.errors import ModelError

STRING, ARRAY, UINT32, INT32, FLOAT32 = 8, 9, 4, 5, 6
F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8


def text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def typed(value):
    if isinstance(value, str):
        return struct.pack("<I", STRING) + text(value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT32, value)
    if isinstance(value, int):
        return struct.pack("<II", UINT32, value)
    inner, pack = (STRING, text) if isinstance(value[0], str) else (INT32, int32)
    return struct.pack("<IIQ", ARRAY, inner, len(value)) + b"".join(map(pack, value))


def int32(value):
    return struct.pack("<i", value)


def encode(array, kind):
    """Raw bytes, and the values they stand for."""
    flat = array.astype(np.float32).ravel()
    if kind in (F32, F16):
        raw = flat.astype("<f4" if kind == F32 else "<f2")
        return raw.tobytes(), raw.astype(np.float32).reshape(array.shape)
    blocks = flat.reshape(-1, 32)
    low = blocks.min(1).astype("<f2") if kind == Q4_1 else None
    span = blocks.max(1) - low.astype(np.float32) if kind == Q4_1 else np.abs(blocks).max(1)
    scale = (span / (15 if kind == Q4_1 else 127)).astype("<f2")
    wide = scale.astype(np.float32)[:, None]
    if kind == Q8_0:
        steps = np.clip(np.round(blocks / wide), -127, 127).astype(np.int8)
        raw = b"".join(s.tobytes() + q.tobytes() for s, q in zip(scale, steps, strict=True))
        return raw, (steps * wide).reshape(array.shape)
    base = low.astype(np.float32)[:, None]
    steps = np.clip(np.round((blocks - base) / wide), 0, 15).astype(np.uint8)
    packed = steps[:, :16] | (steps[:, 16:] << 4)
    rows = zip(scale, low, packed, strict=True)
    raw = b"".join(s.tobytes() + m.tobytes() + q.tobytes() for s, m, q in rows)
    return raw, (steps * wide + base).reshape(array.shape)


def write_gguf(path, values, tensors):
    """`tensors`: name -> (array, kind). Returns the values that a reader should find."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    head += b"".join(text(key) + typed(value) for key, value in values.items())
    body, found = b"", {}
    for name, (array, kind) in tensors.items():
        raw, found[name] = encode(array, kind)
        head += text(name) + struct.pack("<I", array.ndim)
        head += struct.pack(f"<{array.ndim}Q", *reversed(array.shape))
        head += struct.pack("<IQ", kind, len(body))
        body += raw + b"\0" * (-len(raw) % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + body)
    return found


@pytest.mark.parametrize("kind", [F32, F16, Q4_1, Q8_0])
def test_tensors_are_dequantised(tmp_path, kind):
    array = np.random.default_rng(0).normal(size=(6, 64))
    found = write_gguf(tmp_path / "a.gguf", {"k": 1}, {"x": (array, kind), "y": (array, F32)})
    file = read_gguf(tmp_path / "a.gguf")
    np.testing.assert_array_equal(file.tensor("x"), found["x"])
    np.testing.assert_array_equal(file.tensor("y"), array.astype(np.float32))
    np.testing.assert_allclose(found["x"], array, atol=0.3)


def llama_cpp_order(weight, heads):
    """How llama.cpp's converter stores query and key rows."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def as_gguf(model, path):
    config = model.config
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<unk>", "<s>", "</s>", *alphabet, "th"]
    tokens += [f"<spare{i}>" for i in range(config.vocab_size - len(tokens))]
    values = {
        "general.architecture": "llama",
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }
    short = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k"}
    short |= {"self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output"}
    short |= {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
    short |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    top |= {"lm_head.weight": "output.weight"}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {}
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        if name in top:
            tensors[top[name]] = (array, F32)
            continue
        _, _, layer, *part, _ = name.split(".")
        target = short[".".join(part)]
        if target in heads:
            array = llama_cpp_order(array, heads[target])
        tensors[f"blk.{layer}.{target}.weight"] = (array, F32)
    write_gguf(path, values, tensors)


def test_a_written_folder_is_the_model_that_went_in(tmp_path, build_model):
    model = build_model("llama").eval()
    as_gguf(model, tmp_path / "a.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    write_folder(read_gguf(tmp_path / "a.gguf"), folder)
    copy = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = torch.arange(3, 23)[None]
    with torch.inference_mode():
        torch.testing.assert_close(copy(ids).logits, model(ids).logits, rtol=0, atol=1e-5)
    assert copy.generation_config.eos_token_id == 2
    assert tokenizer.eos_token == "</s>"
    assert tokenizer.convert_ids_to_tokens(tokenizer("th</s>12")["input_ids"]) == [
        *("th", "</s>", "1", "2")
    ]


def test_files_that_are_no_gguf_or_cut_short_are_refused(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGML" + b"\0" * 64)
    with pytest.raises(ModelError, match="not a GGUF"):
        read_gguf(path)
    write_gguf(path, {"key": "value"}, {"x": (np.ones((4, 32)), F32)})
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError):
            read_gguf(path)
    path.write_bytes(whole)
    with pytest.raises(ModelError, match="no value"):
        write_folder(read_gguf(path), tmp_path)


def test_a_quantisation_that_is_not_read_is_named(tmp_path):
    path = tmp_path / "a.gguf"
    write_gguf(path, {}, {"x": (np.ones((4, 32)), F32)})
    raw = bytearray(path.read_bytes())
    at = raw.index(text("x")) + len(text("x")) + 4 + 16
    raw[at : at + 4] = struct.pack("<I", 14)
    path.write_bytes(raw)
    with pytest.raises(ModelError, match="type 14"):
        read_gguf(path).tensor("x")
