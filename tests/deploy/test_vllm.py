"""Rules and board for vLLM ask for what there is: what is on it here, and what is not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from forebay.cache.figures import FIGURES
from forebay.vllm.seen.measures import FAMILIES

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana-vllm.json").read_text())
# Of vLLM's own, those that are used; they are in its releases from 0.26 on.
VLLMS_OWN = {
    "vllm:e2e_request_latency_seconds",
    "vllm:generation_tokens",
    "vllm:num_preemptions",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prefix_cache_hits",
    "vllm:prefix_cache_queries",
    "vllm:prompt_tokens",
    "vllm:request_queue_time_seconds",
    "vllm:request_success",
    "vllm:request_time_per_output_token_seconds",
    "vllm:time_to_first_token_seconds",
}
# What only `forebay serve` has; the page on vLLM names what follows for alerts and board.
SERVERS_OWN = {"forebay:build_info", "forebay:requests_refused", "forebay:state"}
_SUFFIX = re.compile(r"_(total|bucket|sum|count)$")


def asked(text: str) -> set[str]:
    """Names of families in a text with queries, without those that rules record."""
    bare = re.sub(r"#.*", "", text)
    names = set(re.findall(r"\b(?:vllm|forebay):[a-z0-9_]+(?![a-z0-9_:])", bare))
    return {_SUFFIX.sub("", name) for name in names}


def queries(board: dict[str, Any]) -> str:
    return "\n".join(
        target["expr"] for panel in board["panels"] for target in panel.get("targets", [])
    )


def test_what_vllm_is_asked_for_is_there():
    there = {family.name for family in FAMILIES} | VLLMS_OWN
    rules = (DEPLOY / "rules-vllm.yml").read_text()
    assert asked(rules) <= there
    assert asked(queries(BOARD)) <= there


def test_what_is_shared_is_there_but_for_what_is_the_servers_own():
    there = {family.name for family in FAMILIES} | VLLMS_OWN
    shared = asked((DEPLOY / "rules.yml").read_text())
    shared |= asked(queries(json.loads((DEPLOY / "grafana.json").read_text())))
    assert shared - there == SERVERS_OWN


def test_everything_that_only_vllm_has_is_on_its_board():
    shared = asked(queries(json.loads((DEPLOY / "grafana.json").read_text())))
    alone = {family.name for family in FAMILIES} - {figure.name for figure in FIGURES} - shared
    assert "forebay:hints" in alone
    assert alone <= asked(queries(BOARD))
