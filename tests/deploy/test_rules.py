"""The alert rules, by promtool: each alert fires on its trouble, alone, and on nothing less."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from alert_cases import CASES, HEALTHY, MINUTES, VLLM_CASES, VLLM_HEALTHY, Case, Series

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
FILES = ("rules.yml", "rules-vllm.yml")
# Inside vLLM the rules of the cache hold as well.
WATCHED = [
    pytest.param(FILES[:1], HEALTHY, CASES, id="server"),
    pytest.param(FILES, VLLM_HEALTHY, VLLM_CASES, id="vllm"),
]


def promtool(*arguments: object) -> str:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run(
        ["promtool", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_files_are_valid():
    for file in FILES:
        promtool("check", "rules", DEPLOY / file)
    promtool("check", "config", DEPLOY / "prometheus.yml")


@pytest.mark.parametrize(
    ("file", "cases"), [(FILES[0], CASES), (FILES[1], VLLM_CASES)], ids=["server", "vllm"]
)
def test_every_alert_has_a_case_and_says_what_to_do(file: str, cases: tuple[Case, ...]):
    text = (DEPLOY / file).read_text()
    alerts = re.findall(r"- alert: (\w+)", text)
    assert sorted(alerts) == sorted(case.alert for case in cases)
    for part in text.split("- alert: ")[1:]:
        body = part.split("\n  - name:")[0]
        for needed in ("severity: ", "summary: ", "description: ", "action: "):
            assert body.count(needed) == 1, body.splitlines()[0]
    severities = set(re.findall(r"severity: (\w+)", text.partition("groups:")[2]))
    assert severities <= {"page", "ticket", "info"}


def group(name: str, series: Series, expected: dict[int, list[str]]) -> dict[str, Any]:
    """A promtool test: which alerts fire at which minute."""
    return {
        "name": name,
        "interval": "1m",
        "input_series": [
            {"series": each, "values": f"{start:g}+{grows:g}x{MINUTES}"}
            for each, (start, grows) in series.items()
        ],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{minute}m",
                "exp_samples": [
                    {"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in alerts
                ],
            }
            for minute, alerts in expected.items()
        ],
    }


@pytest.mark.parametrize(("files", "healthy", "cases"), WATCHED)
def test_each_alert_fires_on_its_trouble_alone_and_not_before(
    tmp_path: Path, files: tuple[str, ...], healthy: Series, cases: tuple[Case, ...]
):
    longest = max(case.minutes for case in cases)
    groups = [group("healthy", healthy, {5: [], longest: []})]
    for case in cases:
        expected = {case.minutes: [case.alert]}
        if case.minutes > 1:
            expected[case.minutes // 2] = []
        groups.append(group(case.alert, healthy | case.trouble, expected))
        if case.nearly:
            nearly = {case.minutes + 5: []}
            groups.append(group(f"nearly {case.alert}", healthy | case.nearly, nearly))
    file = tmp_path / "rules_test.yml"
    file.write_text(
        json.dumps(
            {
                "rule_files": [str(DEPLOY / each) for each in files],
                "tests": groups,
                "evaluation_interval": "1m",
            }
        )
    )
    promtool("test", "rules", file)


def test_a_case_that_does_not_hold_is_found(tmp_path: Path):
    wrong = group("wrong", HEALTHY, {60: ["ForebayDown"]})
    file = tmp_path / "rules_test.yml"
    file.write_text(json.dumps({"rule_files": [str(DEPLOY / "rules.yml")], "tests": [wrong]}))
    with pytest.raises(AssertionError, match="ForebayDown"):
        promtool("test", "rules", file)
