"""The dashboard: every query is PromQL, and every panel has a place and a number of its own."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest

DASHBOARD = json.loads(
    (Path(__file__).resolve().parents[2] / "grafana/expertwire.json").read_text())
WIDTH = 24  # of Grafana's grid


def queries(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("expr"), str):
            yield part["expr"]
        part = list(part.values())
    if isinstance(part, list):
        for each in part:
            yield from queries(each)


QUERIES = sorted(set(queries(DASHBOARD)))


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_is_promql(query):
    """Grafana's variables are replaced before Prometheus sees them: intervals, then names."""
    given = re.sub(r"\$__(rate_)?interval|\$__range", "1m", query)
    promql_parser.parse(re.sub(r"\$\{?\w+\}?", "x", given))


def test_a_query_that_is_none_is_noticed():
    assert len(QUERIES) > 20
    with pytest.raises(ValueError):
        promql_parser.parse("sum by (server (rate(expertwire_rows_total[1m]))")


def test_panels_have_numbers_and_places_of_their_own():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    assert all(p["x"] >= 0 and p["x"] + p["w"] <= WIDTH and p["h"] > 0 for p in places)
    for a, b in itertools.combinations(places, 2):
        assert (a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
                or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]), (a, b)
