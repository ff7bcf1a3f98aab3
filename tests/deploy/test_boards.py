"""Every board is laid out, and says what to do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


@pytest.mark.parametrize(
    ("file", "rules"), [("grafana.json", "rules.yml"), ("grafana-vllm.json", "rules*.yml")]
)
def test_the_board_is_laid_out_and_names_alerts_that_there_are(file: str, rules: str):
    panels: list[dict[str, Any]] = json.loads((DEPLOY / file).read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)
    text = "".join(each.read_text() for each in DEPLOY.glob(rules))
    alerts = set(re.findall(r"- alert: (\w+)\n", text))
    assert alerts
    for panel in panels:
        if panel["type"] == "row":
            continue
        assert len(panel["description"]) > 30, panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert set(re.findall(r"\bForebay[A-Z]\w+", panel["description"])) <= alerts
