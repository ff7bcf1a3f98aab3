"""What the documentation shows runs as it stands there, and what it lists is what there is."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import urllib.request

import pytest
from pages import DOCS, PAGES, ROOT, blocks, page, rows
from prometheus_client.parser import text_string_to_metric_families
from reader import Reader
from server_rig import serving, tiny_model
from typer.main import get_command

from forebay.cli import app
from forebay.engine.settings import EngineSettings
from forebay.server.headers import described
from forebay.server.schemas import _REFUSED, GenerationRequest
from forebay.server.settings import ServerSettings

# Every block that is not run, by its first line. Whoever adds one says why, there and here.
NOT_RUN = {
    ("index.md", "make setup"),
    ("index.md", "make demo"),
    ("load.md", ".venv-loadgen/bin/aiperf profile --ui none \\"),
    ("operations.md", "cp deploy/forebay.service /etc/systemd/system/"),
    (
        "serving.md",
        "forebay serve --device cuda:1 --device-tokens 262144 --host-bytes 64GiB --port 8000",
    ),
    ("performance.md", "forebay bench transfer --json transfer.json --picture transfer.png"),
    ("serving.md", "forebay serve --model HuggingFaceTB/SmolLM2-360M-Instruct --port 8000"),
    ("tuning.md", "forebay tune --model smollm2 --device auto"),
    ("tuning.md", "from forebay.engine.engine import Engine"),
    ("vllm-support.md", "make test-vllm"),
    ("vllm.md", "pip install '.[vllm]'"),
    (
        "vllm.md",
        'vllm serve MODEL --kv-transfer-config \'{"kv_connector": "ForebayConnector", '
        '"kv_role": "kv_both",',
    ),
    (
        "vllm.md",
        "curl --fail-with-body -s http://127.0.0.1:8000/metrics | grep -E \\",
    ),
    ("vllm.md", ".venv-vllm/bin/python tests/vllm/vllm_cli.py serve ~/.cache/forebay/smollm2-* \\"),
    ("vllm.md", "curl --fail-with-body -s http://127.0.0.1:8000/v1/completions \\"),
    ("vllm.md", "for turn in 1 2; do"),
    ("vllm.md", "echo b0 > /run/forebay/mode"),
    (
        "vllm-figures.md",
        "vllm bench serve --model MODEL --base-url http://127.0.0.1:8000 "
        "--dataset-name prefix_repetition \\",
    ),
    ("vllm-figures.md", ".venv-loadgen/bin/aiperf profile --ui none \\"),
    (
        "vllm-figures.md",
        "python benchmarks/inside_vllm run results --seconds 720 \\",
    ),
}
WITH_ITS_OWN_MODEL = "index.md"
TO_READ = {"architecture.md", "vllm-inside.md", "vllm-support.md"}


@pytest.fixture(scope="module")
def tiny():
    return tiny_model()


@pytest.fixture
def reader_of(tiny, tmp_path, monkeypatch):
    for tool in ("bash", "curl", "jq"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    monkeypatch.chdir(tmp_path)
    for name in ("FOREBAY_API_KEY", "FOREBAY_OPERATOR_KEY"):
        monkeypatch.delenv(name, raising=False)
    readers: list[Reader] = []

    def make(name: str) -> Reader:
        model = None if name == WITH_ITS_OWN_MODEL else tiny
        readers.append(Reader(tmp_path, model, monkeypatch))
        return readers[-1]

    yield make
    for reader in readers:
        reader.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in PAGES if name not in TO_READ])
def test_the_commands_of_a_page_run(name, reader_of):
    reader = reader_of(name)
    todo = [b for b in blocks(name) if b.language in ("sh", "python") and not b.reason]
    assert todo
    for block in todo:
        # CI installs it; elsewhere the rest of the page still runs.
        if "promtool" not in block.text or shutil.which("promtool"):
            reader.run(block)


def test_what_is_not_run_is_listed():
    found = {(n, b.text.splitlines()[0]) for n in PAGES for b in blocks(n) if b.reason}
    assert found == NOT_RUN


def test_every_block_says_what_it_is():
    for name in PAGES:
        found = blocks(name)
        assert 2 * len(found) == len(re.findall(r"^ *```", page(name), flags=re.MULTILINE)), name
        assert {block.language for block in found} <= {"sh", "python", "json", "text"}, name
        for block in found:
            if block.language == "json":
                json.loads(block.text)


def test_every_option_of_serve_is_listed_with_its_default():
    command = get_command(app).commands["serve"]  # pyright: ignore[reportAttributeAccessIssue]
    options = {
        param.opts[0]: "" if param.default is None else str(param.default)
        for param in command.params
    }
    options = {name: default for name, default in options.items() if name != "--help"}
    options |= {name: "" for name, default in options.items() if default == "[]"}
    listed = {row[0].strip("`"): row[1].strip("`") for row in rows(page("serving.md"))}
    listed = {name: default for name, default in listed.items() if name.startswith("--")}
    assert listed == options


def test_every_metric_is_listed_and_no_other(tiny):
    engine = EngineSettings(device_tokens=4096, host_bytes=1 << 24, block_tokens=16)
    with (
        serving(tiny, ServerSettings(port=0), engine) as served,
        urllib.request.urlopen(f"{served.url}/metrics", timeout=10) as answer,
    ):
        families = list(text_string_to_metric_families(answer.read().decode()))
    there = {
        family.name + "_total" * (family.type == "counter"): (
            family.type,
            {label for sample in family.samples for label in sample.labels} - {"model_name", "le"},
        )
        for family in families
        if not family.name.endswith("_created")
    }
    listed = {
        row[0].strip("`"): (row[1], set(re.findall(r"`(\w+)`", row[2])))
        for row in rows(page("metrics.md"))
        if len(row) == 4 and row[0].startswith("`")
    }
    assert listed == there


def test_every_alert_is_listed_with_its_severity():
    rules = (ROOT / "deploy" / "rules.yml").read_text(encoding="utf-8")
    there = re.findall(r"alert: (\w+).*?severity: (\w+)", rules, flags=re.DOTALL)
    listed = [row[:2] for row in rows(page("metrics.md")) if row[0].startswith("`Forebay")]
    assert [(name.strip("`"), severity) for name, severity in listed] == there


def test_every_limit_is_listed_with_its_value():
    listed = {row[0].strip("`"): row[1] for row in rows(page("operations.md"))}
    for field in dataclasses.fields(ServerSettings):
        if field.name.startswith("max_") or field.name.endswith("_s"):
            assert listed.get(field.name) == str(getattr(ServerSettings(), field.name)), field.name


def test_every_endpoint_is_listed(tiny):
    engine = EngineSettings(device_tokens=4096, host_bytes=1 << 24, block_tokens=16)
    with (
        serving(tiny, ServerSettings(port=0), engine) as served,
        urllib.request.urlopen(f"{served.url}/openapi.json", timeout=10) as answer,
    ):
        paths = json.load(answer)["paths"]
    there = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    listed = {(row[0], row[1].strip("`")) for row in rows(page("api.md")) if len(row) == 4}
    listed = {row for row in listed if row[0] in ("GET", "POST")}
    # The live page and its stream are not in the description.
    assert listed == there | {("GET", "/"), ("GET", "/v1/forebay/live")}


def test_fields_headers_and_refusals_are_listed():
    text = page("api.md")
    for name in (*GenerationRequest.model_fields, *_REFUSED):
        assert f"`{name}`" in text, name
    for header in described():
        assert f"`{header['name']}`" in text, header["name"]


def test_the_site_builds_and_fetches_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("zensical")
    from click.testing import CliRunner  # noqa: PLC0415
    from zensical.main import cli  # noqa: PLC0415

    shutil.copytree(DOCS, tmp_path / "docs")
    config = shutil.copy(ROOT / "zensical.toml", tmp_path)
    done = CliRunner().invoke(cli, ["build", "--strict", "--clean", "--config-file", str(config)])
    assert done.exit_code == 0, done.output
    site = tmp_path / "build" / "site"
    for name in PAGES:
        html = (site / name).with_suffix(".html").read_text(encoding="utf-8")
        assert not re.findall(r"<(?:script|img|link)\b[^>]*(?:src|href)=\"?(?:https?:)?//", html)
        for other in PAGES:
            assert other == name or f'{other.removesuffix(".md")}.html"' in html, other
