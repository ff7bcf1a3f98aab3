"""A tiny model that sees images, with random weights that are the same every time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_models import VOCAB
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

IMAGE = VOCAB - 1
"""The token that stands for a whole image in a prompt, and for each of its parts behind that."""
SIDE, PATCH = 28, 4
IMAGE_TOKENS = (SIDE // PATCH) ** 2
_TEXT: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}
_SIGHT: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
}


def save(folder: Path) -> None:
    """The model, its processor, and a tokenizer of as many words as it has tokens."""
    torch.manual_seed(7)
    kinds: Any = transformers
    config = kinds.LlavaConfig(
        text_config=_TEXT, vision_config=_SIGHT, image_token_index=IMAGE, vision_feature_layer=-1
    )
    model = kinds.LlavaForConditionalGeneration(config).float()
    for weight in model.parameters():
        if weight.dim() > 1:
            # Far from 0.02, so that greedy tokens vary with what is seen.
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    words = {f"t{token}": token for token in range(IMAGE)} | {"<image>": IMAGE}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special: dict[str, Any] = {"unk_token": "t0", "pad_token": "t0", "eos_token": "t2"}
    # One behind the other, too.
    special["additional_special_tokens"] = ["<image>"]
    kinds.LlavaProcessor(
        image_processor=CLIPImageProcessorPil(
            size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
        ),
        tokenizer=kinds.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
