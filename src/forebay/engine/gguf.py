"""Reads a GGUF file of the Llama architecture into a Hugging Face folder.

The one idea: a GGUF file is a header of typed values and a flat run of tensors, so numpy reads it
in a second where the general converters take most of a minute. Format: the GGUF specification of
the ggml project, version 3. Only what such a file needs is read: F32, F16, Q4_1, Q8_0, and a
byte-level BPE vocabulary.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import ModelError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q"}
_SCALARS |= {11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_BLOCK = 32
_Q4_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("packed", "u1", (_BLOCK // 2,))])
_Q8_0 = np.dtype([("scale", "<f2"), ("values", "i1", (_BLOCK,))])
_CONTROL_TOKEN = 3

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Header values by key, and per tensor its shape (rows first), quantisation and raw bytes."""

    path: Path
    values: dict[str, Any]
    tensors: dict[str, tuple[tuple[int, ...], int, NDArray[np.uint8]]]

    def value(self, key: str) -> Any:
        """The header value of `key`; ModelError if the file has none."""
        if key not in self.values:
            raise ModelError(f"{self.path} has no value {key!r}: not a file this reader knows")
        return self.values[key]

    def tensor(self, name: str) -> NDArray[np.float32]:
        """The dequantised tensor, float32, shape with rows first."""
        shape, kind, raw = self.tensors[name]
        decode = _DECODERS.get(kind)
        if decode is None:
            raise ModelError(
                f"{self.path}: tensor {name!r} has GGUF type {kind}; F32, F16, Q4_1, Q8_0 are read"
            )
        return decode(raw[: _tensor_bytes(shape, kind)]).reshape(shape)


class _Cursor:
    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._view = data.data
        self.at = 0

    def scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._view, self.at)
        self.at += struct.calcsize(form)
        return value

    def text(self) -> str:
        size = self.scalar("<Q")
        self.at += size
        return str(self._view[self.at - size : self.at], "utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.scalar("<I"), self.scalar("<Q")
            return [self.value(inner) for _ in range(count)]
        return self.scalar(_SCALARS[kind])


def read_gguf(path: Path) -> GgufFile:
    """Parses the header and maps the tensors; raises ModelError if it is no whole GGUF 2 or 3."""
    if not path.stat().st_size:
        raise ModelError(f"{path} is empty: fetch the file anew")
    data = np.memmap(path, dtype=np.uint8, mode="r")
    cursor = _Cursor(data)
    try:
        magic, version = cursor.scalar("<4s"), cursor.scalar("<I")
        if magic != b"GGUF" or version not in (2, 3):
            raise ModelError(f"{path} is not a GGUF file of version 2 or 3")
        tensor_count, value_count = cursor.scalar("<Q"), cursor.scalar("<Q")
        values = {cursor.text(): cursor.value(cursor.scalar("<I")) for _ in range(value_count)}
        infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(tensor_count):
            name, dims = cursor.text(), cursor.scalar("<I")
            shape = tuple(reversed([cursor.scalar("<Q") for _ in range(dims)]))
            infos[name] = (shape, cursor.scalar("<I"), cursor.scalar("<Q"))
    except (struct.error, KeyError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} has a damaged GGUF header: fetch the file anew") from error
    alignment = values.get("general.alignment", 32)
    base = -(-cursor.at // alignment) * alignment
    tensors = {name: (s, kind, data[base + at :]) for name, (s, kind, at) in infos.items()}
    for name, (shape, kind, raw) in tensors.items():
        if len(raw) < _tensor_bytes(shape, kind):
            raise ModelError(f"{path} ends before tensor {name!r}: fetch the file anew")
    return GgufFile(path, values, tensors)


def _tensor_bytes(shape: tuple[int, ...], kind: int) -> int:
    items = int(np.prod(shape))
    quantised = {3: _Q4_1, 8: _Q8_0}
    if kind in quantised:
        return items // _BLOCK * quantised[kind].itemsize
    return items * {0: 4, 1: 2}.get(kind, 0)


def _decode_q4_1(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    blocks = raw.view(_Q4_1)
    packed = blocks["packed"]
    values = np.concatenate([packed & 0x0F, packed >> 4], axis=1).astype(np.float32)
    values *= blocks["scale"].astype(np.float32)[:, None]
    values += blocks["minimum"].astype(np.float32)[:, None]
    return values


def _decode_q8_0(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    blocks = raw.view(_Q8_0)
    return blocks["values"].astype(np.float32) * blocks["scale"].astype(np.float32)[:, None]


_DECODERS: dict[int, Callable[[NDArray[np.uint8]], NDArray[np.float32]]] = {
    0: lambda raw: raw.view("<f4").astype(np.float32),
    1: lambda raw: raw.view("<f2").astype(np.float32),
    3: _decode_q4_1,
    8: _decode_q8_0,
}


def llama_weights(file: GgufFile) -> dict[str, NDArray[np.float32]]:
    """Tensors under their Hugging Face names, query and key rows back in Hugging Face order.

    llama.cpp stores the rows of a head so that the two halves of a rotary pair are neighbours;
    Hugging Face keeps the halves apart.
    """
    heads = {
        "attn_q": file.value("llama.attention.head_count"),
        "attn_k": file.value("llama.attention.head_count_kv"),
    }
    weights: dict[str, NDArray[np.float32]] = {}
    for name in file.tensors:
        tensor = file.tensor(name)
        if name in _TOP_NAMES:
            weights[_TOP_NAMES[name]] = tensor
            continue
        _, layer, part, suffix = name.split(".")
        if part in heads:
            pairs = tensor.reshape(heads[part], -1, 2, tensor.shape[1])
            tensor = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(tensor.shape)
        weights[f"model.layers.{layer}.{_LAYER_NAMES[part]}.{suffix}"] = tensor
    return weights


def llama_config(file: GgufFile) -> dict[str, Any]:
    """The `config.json` of the file's model, float32."""
    heads = file.value("llama.attention.head_count")
    hidden = file.value("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": file.value("llama.feed_forward_length"),
        "num_hidden_layers": file.value("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.value("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": file.value("llama.context_length"),
        "rms_norm_eps": file.value("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": file.value("llama.rope.freq_base"),
        "vocab_size": len(file.value("tokenizer.ggml.tokens")),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.value("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }


def write_folder(file: GgufFile, folder: Path) -> None:
    """Writes safetensors, config, generation config and tokenizer into the existing `folder`."""
    if (
        file.value("general.architecture") != "llama"
        or file.value("tokenizer.ggml.pre") != "smollm"
    ):
        raise ModelError(f"{file.path}: only SmolLM GGUF files are converted; use a folder instead")
    from safetensors.numpy import save_file  # noqa: PLC0415  (an engine extra, slow to import)

    config = llama_config(file)
    save_file(llama_weights(file), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=1))
    _write_tokenizer(file, folder)


def _write_tokenizer(file: GgufFile, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415

    tokens: list[str] = file.value("tokenizer.ggml.tokens")
    kinds: list[int] = file.value("tokenizer.ggml.token_type")
    merges = [tuple(pair.split(" ", 1)) for pair in file.value("tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer: Any = Tokenizer(models.BPE(vocab, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    settings: dict[str, Any] = {
        f"{ours}_token": tokens[file.value(f"tokenizer.ggml.{theirs}_token_id")]
        for ours, theirs in names.items()
    }
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.value("llama.context_length"),
        "chat_template": file.value("tokenizer.chat_template"),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
