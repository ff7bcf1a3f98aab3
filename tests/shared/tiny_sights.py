"""Tiny models that see images, with random weights that are the same every time.

Beside what `tiny_models` needs, the Qwen needs torchvision.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image
from tiny_models import VOCAB
from tokenizers import Tokenizer, models, pre_tokenizers

_KINDS: Any = transformers
_SIDE, _PATCH, _MERGED = 28, 4, 8
_MARKS = ("<image>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_MARK = {name: VOCAB - 1 - place for place, name in enumerate(_MARKS)}
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}


class Sight(NamedTuple):
    """A model that sees: how it is saved into a folder, for heads of so many numbers.

    `shown` are the tokens of an image in a prompt, which become `tokens` of it.
    """

    save: Callable[[Path, int], None]
    shown: tuple[int, ...]
    tokens: Callable[[Image.Image], int]


def image_of(seed: int) -> Image.Image:
    """Noise, of one of two sizes."""
    width = _SIDE * (1 + seed % 2)
    noise = np.random.default_rng(seed).integers(0, 256, (_SIDE, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def _save_llava(folder: Path, head_size: int) -> None:
    sight = {
        "model_type": "clip_vision_model",
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": _SIDE,
        "patch_size": _PATCH,
    }
    text = {**_TEXT, "model_type": "llama", "hidden_size": 64, "head_dim": head_size}
    config = _KINDS.LlavaConfig(
        text_config=text,
        vision_config=sight,
        image_token_index=_MARK["<image>"],
        vision_feature_layer=-1,
    )
    _save(_KINDS.LlavaForConditionalGeneration(config), folder)
    _KINDS.LlavaProcessor(
        image_processor=_KINDS.CLIPImageProcessor(
            size={"shortest_edge": _SIDE}, crop_size={"height": _SIDE, "width": _SIDE}
        ),
        tokenizer=_tokenizer(),
        patch_size=_PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)


def _save_qwen(folder: Path, head_size: int) -> None:
    """Positions of three numbers (M-RoPE)."""
    hidden, third = 4 * head_size, head_size // 8
    rope = {"rope_type": "default", "rope_theta": 1e6}
    rope["mrope_section"] = [head_size // 2 - 2 * third, third, third]
    config = _KINDS.Qwen2VLConfig(
        text_config={**_TEXT, "hidden_size": hidden, "rope_parameters": rope},
        vision_config={
            "depth": 2,
            "embed_dim": 128,
            "hidden_size": hidden,
            "num_heads": 2,
            "patch_size": _PATCH,
            "mlp_ratio": 2,
        },
        image_token_id=_MARK["<|image_pad|>"],
        video_token_id=_MARK["<|video_pad|>"],
        vision_start_token_id=_MARK["<|vision_start|>"],
        vision_end_token_id=_MARK["<|vision_end|>"],
    )
    _save(_KINDS.Qwen2VLForConditionalGeneration(config), folder)
    size = {"patch_size": _PATCH, "merge_size": 2, "min_pixels": 64, "max_pixels": 4096}
    _KINDS.Qwen2VLProcessor(
        image_processor=_KINDS.Qwen2VLImageProcessor(**size),
        video_processor=_KINDS.Qwen2VLVideoProcessor(**size),
        tokenizer=_tokenizer(),
    ).save_pretrained(folder)


def _save(model: Any, folder: Path) -> None:
    torch.manual_seed(7)
    for weight in model.parameters():
        if weight.dim() > 1:
            # Far from 0.02, so that greedy tokens vary with what is seen.
            torch.nn.init.normal_(weight, std=0.3)
    model.float().save_pretrained(folder)


def _tokenizer() -> Any:
    """Of as many words as there are tokens."""
    words = {f"t{token}": token for token in range(VOCAB - len(_MARKS))} | _MARK
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special: dict[str, Any] = {"unk_token": "t0", "pad_token": "t0", "eos_token": "t2"}
    # One behind the other, too.
    special["additional_special_tokens"] = list(_MARKS)
    return _KINDS.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


_AROUND = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
SIGHTS = {
    "llava": Sight(_save_llava, (_MARK["<image>"],), lambda _: (_SIDE // _PATCH) ** 2),
    "qwen2_vl": Sight(
        _save_qwen,
        tuple(_MARK[name] for name in _AROUND),
        lambda image: 2 + round(image.height / _MERGED) * round(image.width / _MERGED),
    ),
}
