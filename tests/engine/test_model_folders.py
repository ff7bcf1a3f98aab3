"""Model folders as a stranger may hand them over: refused with a reason, at once, unread."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

from forebay.engine.models import load_model
from forebay.errors import ModelError

BOMB = "[" * 200_000 + "]" * 200_000
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(build_model, byte_tokenizer, tmp_path):
    build_model("llama").save_pretrained(tmp_path)
    byte_tokenizer.save_pretrained(tmp_path)
    return tmp_path


def loop(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    return tmp_path / "a"


def a_file(tmp_path):
    (tmp_path / "file").write_text("{}")
    return tmp_path / "file"


PLACES = {
    "a device": lambda _: "/dev/zero",
    "a loop of links": loop,
    "a file": a_file,
    "above nothing": lambda tmp_path: tmp_path / "none" / ".." / ".." / "none",
    "a line break": lambda _: "a\nb",
    "a null byte": lambda _: "a\0b",
    "a surrogate": lambda _: "/tmp/\udcff",
    "a long name": lambda _: "/" + "a" * 5000,
    "nothing": lambda tmp_path: tmp_path / "none",
    "a home": lambda _: "~nobody/model",
    "an address": lambda _: "https://example.com/model",
    "upwards": lambda _: "../../model",
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_what_is_no_folder_is_said_in_one_line(place, tmp_path):
    with pytest.raises(ModelError, match=r"no folder|too long") as caught:
        load_model(place(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("kind", ["pipe", "device", "loop", "bomb", "endless", "array", "binary"])
def test_texts_that_hang_or_fill_the_memory_are_refused(folder, name, kind):
    file = folder / name
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "loop":
        file.symlink_to(file)
    elif kind == "endless":
        with file.open("wb") as sparse:
            sparse.truncate(1 << 30)
    else:
        file.write_bytes({"bomb": BOMB.encode(), "array": b"[]", "binary": b"\xff\xfe\x00"}[kind])
    with pytest.raises(ModelError):
        load_model(folder)


@pytest.mark.parametrize("content", [BOMB, "{}", "[]", '{"added_tokens": 5}', "\x00" * 1000])
def test_a_tokenizer_that_is_none_is_refused(folder, content):
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError):
        load_model(folder)


def test_a_tokenizer_of_absurd_size_is_refused_unread(folder):
    with (folder / "tokenizer.json").open("wb") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(ModelError, match="more than"):
        load_model(folder)


@pytest.mark.parametrize(
    "name", ["../other/model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", 5, None]
)
def test_an_index_leads_nowhere_else(folder, name, tmp_path):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelError, match=r"no file beside it|damaged|lacks"):
        load_model(folder)


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": 5}', BOMB, "\x00"])
def test_an_index_that_is_none_is_refused(folder, content):
    (folder / INDEX).write_text(content)
    with pytest.raises(ModelError, match="damaged"):
        load_model(folder)


def weights(header: bytes, size: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if size is None else size) + header


def tensor(begin: int, end: int, shape: list[int], dtype: str = "F32") -> bytes:
    named = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    return json.dumps({"model.embed_tokens.weight": named}).encode()


LIES = {
    "an end behind the file": weights(tensor(0, 1 << 40, [1 << 38])),
    "a shape that is larger": weights(tensor(0, 4, [1 << 30])) + b"\0" * 4,
    "a hole": weights(tensor(1 << 20, (1 << 20) + 4, [1])) + b"\0" * 8,
    "an end before its begin": weights(tensor(8, 4, [1])) + b"\0" * 8,
    "a shape that overflows": weights(tensor(0, 4, [1 << 62, 1 << 62])) + b"\0" * 4,
    "a header larger than the file": weights(b"{}", 1 << 62),
    "a header of the file's length": weights(b"{}", 2**64 - 1),
    "a bomb": weights(BOMB.encode()),
    "no json": weights(b"hello"),
    "nothing": b"",
    "another type": weights(tensor(0, 4, [1], "PICKLE")) + b"\0" * 4,
    "a pickle": b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix",
}


@pytest.mark.parametrize("content", LIES.values(), ids=LIES)
def test_weights_that_lie_are_refused(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="damaged"):
        load_model(folder)


def test_more_layers_than_weights_are_refused_before_they_are_made(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**9}))
    with pytest.raises(ModelError, match="1000000000 layers"):
        load_model(folder)


def test_code_of_a_folder_is_never_run_nor_asked_about(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {}}
    for kind in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"):
        config["auto_map"][kind] = f"code.{kind}"
    (folder / "config.json").write_text(json.dumps(config))
    trace = tmp_path / "it ran"
    (folder / "code.py").write_text(f"open({str(trace)!r}, 'w')\n")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(folder)
    assert not trace.exists()


def test_pickled_weights_are_no_weights(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        load_model(folder)


def test_links_within_reach_are_followed(folder, tmp_path):
    """As the hub's own cache has them."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    snapshot = tmp_path / "snapshots" / "a"
    snapshot.mkdir(parents=True)
    for file in [file for file in folder.iterdir() if file.is_file()]:
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
        file.rename(blobs / file.name)
    assert load_model(snapshot).vocab_size == 320


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"num_hidden_layers": "x"}, "num_hidden_layers.* expected int"),
        ({"model_type": "no such type"}, "no such type"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_configuration_is_said(wrong, said, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **wrong}))
    with pytest.raises(ModelError, match=said) as told:
        load_model(folder)
    assert "tokenizer" not in str(told.value)
    assert "\n" not in str(told.value)


def test_a_damaged_tokenizer_is_named(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"its tokenizer is damaged .* copy the tokenizer's files"):
        load_model(folder)
