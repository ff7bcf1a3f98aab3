"""Models: found by name, folder or hub id, and proved to fit before use.

A model is taken if its own attention and ours give the same logits in a tiny forward pass, also
when other requests share the pass. What a family is called does not matter; what it asks of its
attention layers, and whether its requests stay apart in one batch, does.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import shutil
import tempfile
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from forebay.bounds import chosen
from forebay.engine.claims import check_claims
from forebay.engine.folder import SMOLLM2, check_folder, smollm2_file, smollm2_place
from forebay.engine.gguf import read_gguf, write_folder
from forebay.engine.hub import hub_folder, is_hub_id
from forebay.engine.placement import (
    check_placement,
    choose_device,
    choose_dtype,
    describe_device,
)
from forebay.engine.probe import Shape, prove
from forebay.engine.settings import DType, EngineSettings
from forebay.errors import ModelError, SettingsError
from forebay.machine.sizes import show_size

_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len")
_SAMPLE = 16
# What a configuration says of how it was stored, not of what the model computes.
_INCIDENTAL = ("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready for a :class:`~forebay.engine.runner.Runner`.

    `kv_shapes` holds for each layer the ``[heads, dim]`` of K and of V as attention is handed them,
    `kv_dtype` their type. `fingerprint` tells weights, configuration and type apart: equal KV for
    equal tokens. It is made of the configuration and samples of every tensor.
    """

    model: PreTrainedModel = field(repr=False)
    tokenizer: Any = field(repr=False)
    config: PreTrainedConfig = field(repr=False)
    name: str
    fingerprint: str
    eos_token_ids: frozenset[int]
    vocab_size: int
    context_tokens: int
    kv_shapes: tuple[tuple[Shape, Shape], ...] = field(repr=False)
    kv_dtype: torch.dtype


def load_model(
    name_or_path: str | Path, dtype: DType | str = DType.AUTO, device: str = "auto"
) -> LoadedModel:
    """Loads :data:`SMOLLM2`, a local Hugging Face folder, or the model of a hub id.

    See :class:`~forebay.engine.settings.EngineSettings` for what `dtype` and `device` may be.

    Weights are safetensors. Uses the network for a hub id only, and runs no code of the model.
    Raises ModelError, saying what to do, if a file is missing or damaged, or the model needs what
    is not supported; SettingsError for a device or numbers that cannot be had.
    """
    wanted, place = chosen(DType, "dtype", dtype), choose_device(device)
    folder = _find(name_or_path)
    try:
        check_folder(folder)
        check_claims(folder)
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tokenizer = _read_tokenizer(folder)
        stored = getattr(config.get_text_config(), "dtype", None)
        model = _read_model(folder, choose_dtype(wanted, place, stored))
    except (ModelError, SettingsError):
        raise
    except Exception as error:
        # What a damaged or hostile folder makes of the libraries' readers is open-ended.
        raise ModelError(
            f"{folder} cannot be loaded: {_briefly(error)}; copy the model anew, or give another"
        ) from error
    return adopt_model(_moved(model, place, folder), tokenizer, name=str(name_or_path))


def take_model(model: str | Path | LoadedModel, settings: EngineSettings) -> LoadedModel:
    """`model` as it is, or loaded as `settings` wish; raises SettingsError where it is otherwise,
    and what :func:`load_model` raises.
    """
    if not isinstance(model, LoadedModel):
        return load_model(model, settings.dtype, settings.device)
    check_placement(model.model.device, model.kv_dtype, settings)
    return model


def adopt_model(model: PreTrainedModel, tokenizer: Any = None, *, name: str) -> LoadedModel:
    """Takes a decoder that is already in memory; sets its attention to ours, for good.

    Raises ModelError if it is no decoder, or its logits through paged attention differ from its
    own, or change with the other requests in the batch.
    """
    config = model.config
    if config.is_encoder_decoder:
        raise ModelError(f"{name} is an encoder-decoder; only decoder-only models are supported")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ModelError(f"{name}: {type(model).__name__} cannot limit the logits it computes")
    model.eval()
    vocab_size, context_tokens = _vocab_size(model), _context_tokens(config, name)
    fingerprint = _fingerprint(model)
    shapes, kv_dtype = prove(model, name, vocab_size, context_tokens)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=config,
        name=name,
        fingerprint=fingerprint,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        vocab_size=vocab_size,
        context_tokens=context_tokens,
        kv_shapes=shapes,
        kv_dtype=kv_dtype,
    )


def smollm2_folder() -> Path:
    """The converted SmolLM2, made on first use; it appears whole or not at all."""
    source = smollm2_file()
    folder = smollm2_place(source)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            write_folder(read_gguf(source), new)
            new.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return folder


def _find(name: str | Path) -> Path:
    """The folder of a model by its name, path or hub id."""
    if name == SMOLLM2:
        return smollm2_folder()
    if not str(name):
        raise ModelError(f"no model is named: give {SMOLLM2!r}, a folder, or a hub id")
    folder = Path(name)
    if isinstance(name, str) and is_hub_id(name) and not folder.is_dir():
        return hub_folder(name)
    return folder


def _read_tokenizer(folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(
            f"{folder} cannot be loaded: its tokenizer is damaged or not supported "
            f"({_briefly(error)}); copy the tokenizer's files anew"
        ) from error


def _read_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    bar = transformers_logging.is_progress_bar_enabled()
    level = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # what it would say is checked below
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=dtype,
            output_loading_info=True,
        )
        model, report = loaded
    finally:
        transformers_logging.set_verbosity(level)
        if bar:
            transformers_logging.enable_progress_bar()
    if report["missing_keys"] or report["mismatched_keys"]:
        lost = sorted(map(str, {*report["missing_keys"], *report["mismatched_keys"]}))
        raise ModelError(
            f"{folder} has no weights for {len(lost)} tensors, {lost[0]} first: "
            "its weight files belong to another config.json or are incomplete"
        )
    return model


def _moved(model: PreTrainedModel, device: torch.device, folder: Path) -> PreTrainedModel:
    try:
        return model.to(device)  # pyright: ignore[reportArgumentType]
    except torch.OutOfMemoryError as error:
        needed = sum(each.nbytes for each in model.state_dict().values())
        free = torch.cuda.mem_get_info(device)[0]
        raise SettingsError(
            f"{folder} takes {show_size(needed)} in {model.dtype}, and {describe_device(device)} "
            f"has {show_size(free)} left: use a smaller model, another device, or a dtype of 16 bit"
        ) from error


def _briefly(error: Exception) -> str:
    return textwrap.shorten(str(error), 300) or type(error).__name__


def _vocab_size(model: PreTrainedModel) -> int:
    embeddings: Any = model.get_input_embeddings()
    return int(embeddings.weight.shape[0])


def _context_tokens(config: PreTrainedConfig, name: str) -> int:
    decoder = config.get_text_config()
    for key in _CONTEXT_NAMES:
        value = getattr(decoder, key, None)
        if isinstance(value, int) and value > 0:
            return value
    raise ModelError(f"{name}: config.json names no context length ({', '.join(_CONTEXT_NAMES)})")


def _eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """The generation config's word counts first: it is what instruction tuning edits."""
    generation: Any = getattr(model, "generation_config", None)
    for source in (generation, model.config.get_text_config(), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset(ids if isinstance(ids, list | tuple) else [ids])
    return frozenset()


def _fingerprint(model: PreTrainedModel) -> str:
    config = model.config.to_dict()
    for incidental in _INCIDENTAL:
        config.pop(incidental, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().flatten()
        step = max(1, len(flat) // _SAMPLE)
        sample = flat[::step].cpu().contiguous().view(torch.uint8).numpy().tobytes()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(sample)
    return digest.hexdigest()[:32]
