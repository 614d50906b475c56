"""The dashboard in deploy/grafana.json asks for metrics and labels that `/metrics` has."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvcellar.serve import Server, ServeSettings
from tests.serve.fake_engine import FakeEngine
from tests.serve.test_metrics import BUSY
from tests.serve.wire import COMPLETIONS, completion

BOARD: dict[str, Any] = json.loads((Path(__file__).parents[2] / "deploy/grafana.json").read_text())
QUERIES = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
NAME = re.compile(r"\bkvcellar_\w+")
GROUPED = re.compile(r"by \((\w+)\) \((?:rate\()?(kvcellar_\w+)")


@pytest.fixture
def page(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(engine, "counted", BUSY)
    with Server(engine, ServeSettings(port=0)) as server:
        assert httpx.post(f"{server.url}{COMPLETIONS}", json=completion()).status_code == 200
        return httpx.get(f"{server.url}/metrics").text


def test_every_metric_of_the_dashboard_is_on_the_page(page: str) -> None:
    types = dict(re.findall(r"^# TYPE (\S+) (\w+)$", page, re.M))
    found = {name for name, kind in types.items() if kind != "histogram"}
    found |= {f"{name}_bucket" for name, kind in types.items() if kind == "histogram"}
    variable = next(one["query"] for one in BOARD["templating"]["list"] if one["name"] == "model")
    asked = {name for query in [*QUERIES, variable] for name in NAME.findall(query)}
    assert asked - found == set()
    assert len(asked) > 20


def test_every_label_of_the_dashboard_is_on_the_page(page: str) -> None:
    labels = {name: set(re.findall(r'(\w+)="', text)) for name, text in re.findall(r"^(\w+)\{(.*)\}", page, re.M)}
    asked = {(name, label) for query in QUERIES for label, name in GROUPED.findall(query)}
    assert {(name, label) for name, label in asked if label not in labels[name]} == set()
    assert all("model_name" in labels[name] for name, _ in asked)


def test_panels_have_ids_and_places_of_their_own() -> None:
    panels = BOARD["panels"]
    assert len({one["id"] for one in panels}) == len(panels)
    assert len({(one["gridPos"]["x"], one["gridPos"]["y"]) for one in panels}) == len(panels)
    for query in QUERIES:
        assert query.count("(") == query.count(")")
        assert query.count("{") == query.count("}")
