"""A tiny random decoder that can chat: one token a byte, and a chat template; and few words."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from byte_tokens import byte_tokenizer

from forebay.demo.workload import Conversation, Workload

TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def talker_tokenizer() -> transformers.PreTrainedTokenizerFast:
    wrapped = byte_tokenizer()
    wrapped.chat_template = TEMPLATE
    return wrapped


def talker_model() -> transformers.PreTrainedModel:
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(
        "llama",
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def save_talker(folder: Path) -> Path:
    """Write the model folder that `load_model` reads."""
    talker_model().save_pretrained(folder)
    talker_tokenizer().save_pretrained(folder)
    return folder


def small_talk(users: int = 6, turns: int = 3) -> Workload:
    """A shared system prompt of about 100 tokens, a first message of 300, and short ones."""
    return Workload(
        "Answer in one word. " * 5,
        tuple(
            Conversation(
                f"topic {user}",
                (
                    f"Topic {user}. " + f"What about number {user}? " * 12,
                    *(f"And what about number {turn}?" for turn in range(1, turns)),
                ),
            )
            for user in range(users)
        ),
    )
