"""Every query of rules and board, asked of a real Prometheus that scrapes a server under load."""

from __future__ import annotations

import json
import math
import re
import shutil
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from watched import DEPLOY, KEY, Prometheus, busy_server, prometheus, until

BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text())
VARIABLES = {"$__rate_interval": "30s", "$model": ".*", "$instance": ".*"}
# What has happened once the load has been through every pool; then every share has a denominator.
HAPPENED = (
    'forebay:blocks_total{source="host"} > 0',
    'forebay:prefetch_bytes_total{outcome="used"} > 0',
    "forebay:saved_bytes_total > 0",
    'forebay:evicted_blocks_total{tier="device"} > 0',
    "vllm:request_time_per_output_token_seconds_count > 0",
    "forebay:hidden:share_rate10m",
    "forebay:prefetch_outcome:share_rate10m",
    "count_over_time(up[1m]) >= 5",
)


@dataclass(frozen=True)
class Watched:
    """A Prometheus that has seen a load, and the names that the server exposes."""

    prometheus: Prometheus
    names: frozenset[str]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    folder = tmp_path_factory.mktemp("prometheus")
    with busy_server() as port, prometheus(folder, port) as watching:
        for expression in HAPPENED:
            assert until(lambda q=expression: bool(watching.values(q)), 60), expression
        yield Watched(watching, exposed_names(port))


def exposed_names(port: int) -> frozenset[str]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"authorization": f"Bearer {KEY}"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return frozenset(sample.name for family in families for sample in family.samples)


def panels() -> list[dict[str, Any]]:
    return [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def filled(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


def board_queries() -> list[tuple[str, str]]:
    return [
        (panel["title"], filled(target["expr"]))
        for panel in panels()
        for target in panel["targets"]
    ]


def unfiltered(expression: str) -> str:
    """The same with 0 and 1 where a comparison would leave series out."""
    parts = re.split(r"(\{[^}]*\})", expression)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"(==|!=|>=|<=|>|<)", r"\1 bool", parts[i])
        parts[i] = re.sub(r"\bunless\b", "and", parts[i])
    return "".join(parts)


def metric_names(expression: str) -> set[str]:
    bare = re.sub(r"\{[^}]*\}|\"[^\"]*\"", "", expression)
    return set(re.findall(r"\b(?:vllm:|forebay:|process_|up\b)[a-z0-9_:]*", bare))


def rules(watching: Prometheus, file: str = "rules.yml") -> list[dict[str, Any]]:
    groups = watching.get("rules")["groups"]
    return [
        rule for group in groups if group["file"].endswith(f"/{file}") for rule in group["rules"]
    ]


def check(watching: Prometheus, title: str, expression: str) -> None:
    values = watching.values(expression)
    assert values, f"{title}: no data for {expression}"
    assert all(math.isfinite(value) for value in values), f"{title}: {values} for {expression}"


def test_the_server_is_scraped_with_the_key_that_the_file_shows(watched: Watched):
    (target,) = watched.prometheus.get("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    assert target["labels"]["job"] == "forebay"


def test_every_rule_is_evaluated_and_has_data(watched: Watched):
    found = rules(watched.prometheus)
    assert len(found) == len(
        re.findall(r"- (?:alert|record): ", (DEPLOY / "rules.yml").read_text())
    )
    for rule in found:
        assert (rule["health"], rule.get("lastError", "")) == ("ok", ""), rule["name"]
        check(watched.prometheus, rule["name"], unfiltered(rule["query"]))


def test_the_rules_for_vllm_are_evaluated_too(watched: Watched):
    found = rules(watched.prometheus, "rules-vllm.yml")
    assert len(found) == 7
    assert {(rule["health"], rule.get("lastError", "")) for rule in found} == {("ok", "")}


def test_every_panel_has_data(watched: Watched):
    for title, expression in board_queries():
        check(watched.prometheus, title, expression)


def test_every_name_in_a_query_is_exposed_or_recorded(watched: Watched):
    found = rules(watched.prometheus)
    recorded = {rule["name"] for rule in found if rule["type"] == "recording"}
    queries = board_queries() + [(rule["name"], rule["query"]) for rule in found]
    for title, expression in queries:
        names = metric_names(expression)
        assert names, title
        assert names <= watched.names | recorded | {"up"}, title


def test_the_boards_variables_find_the_server(watched: Watched):
    asked = [each for each in BOARD["templating"]["list"] if each["type"] == "query"]
    assert {f"${each['name']}" for each in asked} < set(VARIABLES)
    for variable in asked:
        matched = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"])
        assert matched is not None
        assert variable["query"]["query"] == variable["definition"]
        series = watched.prometheus.get("series", **{"match[]": filled(matched[1])})
        assert {each[matched[2]] for each in series} - {""}, variable["name"]


def test_a_query_of_something_that_is_not_there_is_found(watched: Watched):
    with pytest.raises(AssertionError, match="no data"):
        check(watched.prometheus, "none", "forebay:no_such_thing")
    with pytest.raises(AssertionError, match="parse error"):
        check(watched.prometheus, "none", "rate(")
    assert metric_names('sum by (instance) (rate(forebay:x_total{a="up"}[5m])) > 0') == {
        "forebay:x_total"
    }
