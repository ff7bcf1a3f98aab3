"""A toy engine whose prompts have images: their tokens are all the same, and their content is not.

vLLM's real scheduler says which items the encoder runs for, and which are forgotten. The model sees
an item's tokens as the encoder made them, and refuses to compute one whose item it lacks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm_toy import VOCAB, Asked, Pass, ToyEngine

PLACE = VOCAB - 1
"""The token that stands for a part of an item."""


class Image(NamedTuple):
    """What a client puts in a prompt: `length` tokens, which `seed` tells from others."""

    seed: int
    length: int
    uuid: str = ""

    @property
    def name(self) -> str:
        """What vLLM calls it."""
        return self.uuid or hashlib.sha256(repr(self).encode()).hexdigest()

    def seen(self) -> list[int]:
        """Its tokens as the model sees them, each made of the whole image."""
        own = 1_000 * self.seed + self.length
        return [VOCAB + 100 * own + place for place in range(self.length)]


class SightedEngine(ToyEngine):
    """Its encoder makes `encoder_tokens` of items in a step, and keeps as many."""

    def __init__(self, model: Path, *, encoder_tokens: int = 64, **options: Any) -> None:
        super().__init__(model, **options)
        self.scheduler.max_num_encoder_input_tokens = encoder_tokens
        self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=encoder_tokens)
        self._made: set[str] = set()
        self.encoded = 0

    def show(
        self, parts: Iterable[int | Image], most: int, *, over: Image | None = None, **more: Any
    ) -> Asked:
        """Queue a request for `most` tokens, whose prompt has tokens and images. `over` is one more
        that lies over the first, and of which the model sees nothing.
        """
        tokens: list[int] = []
        seen: list[int] = []
        features: list[MultiModalFeatureSpec] = []
        for part in parts:
            if isinstance(part, Image):
                at = PlaceholderRange(offset=len(tokens), length=part.length)
                features.append(MultiModalFeatureSpec(None, "image", part.name, at, part.name))
                tokens += [PLACE] * part.length
                seen += part.seen()
            else:
                tokens.append(part)
                seen.append(part)
        if over is not None:
            lower, name = features[0], over.name
            features.insert(1, MultiModalFeatureSpec(None, "audio", name, lower.mm_position, name))
        asked = self.ask(tokens, most, mm_features=features, **more)
        asked.prompt, asked.tokens = seen, list(seen)
        return asked

    def forget_encoded(self) -> None:
        """Nothing is left of what the encoder has made. Not while requests run."""
        self.scheduler.reset_encoder_cache()
        self._made.clear()

    def _passes(self, output: Any) -> list[Pass]:
        passes = super()._passes(output)
        self._made.difference_update(output.free_encoder_mm_hashes)
        for name, places in output.scheduled_encoder_inputs.items():
            features = self.asked[name].request.mm_features
            self._made.update(features[place].identifier for place in places)
            self.encoded += len(places)
        for each in passes:
            for feature in each.asked.request.mm_features:
                at = feature.mm_position
                if at.offset < each.end and each.start < at.offset + at.length:
                    assert feature.identifier in self._made, "an item that was not encoded is read"
        return passes
