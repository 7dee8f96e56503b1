"""Status tables on terminals of any size: what is cut, and what is never."""

from __future__ import annotations

import re

import pytest
from rich.console import Console
from tests.unit.test_status import CLIENT, PAIR, facts, server

from expertwire.observe.terminal import NAME_CELLS, parts, render

LONG = "server-on-a-host-with-a-rather-long-name.example"
STAGES = {stage: {"p50_us": 7.3, "p99_us": 1910.0} for stage in
          ("route", "pack", "put", "send", "wait", "combine")}


def given(num_servers=2):
    servers = [{**server(rows=7948, rows_per_s=290.4, bytes_received=2.3e6, stages=STAGES),
                "server_id": f"{LONG}-{i}", "pid": 19282} for i in range(num_servers)]
    clients = [{**CLIENT, "client": f"client-{i}-a1b2c3", "epoch": 1796055736839,
                "servers": {f"{LONG}-{s}": PAIR for s in range(num_servers)}, "stages": STAGES}
               for i in range(2)]
    return facts(servers, clients)


def shown(width, height=None, **options):
    console = Console(width=width, height=height or 25, color_system=None)
    with console.capture() as capture:
        console.print(render("127.0.0.1:7700", given(**options), width, height))
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [80, 100, 132, 250])
def test_no_cell_is_squeezed(width):
    lines = shown(width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for whole in ("1796055736839", "wait p50", "failovers", "received/s", "7.3 us / 1.91 ms",
                  "client-1-a1b2c3", "19282"):
        assert whole in text, whole
    for end in ("-0", "-1"):
        assert re.search(rf"server-on-a.*name\.example{end}|server-on-a-\S*…\S*{end}", text)


def test_a_wide_table_is_cut_after_a_whole_column():
    from expertwire.observe.status_tables import tables

    pairs = next(t for t in tables(given()) if t.name == "pairs")
    cut = parts(pairs, 80, framed=True)
    assert len(cut) > 1 and all(p.columns[:2] == ("client", "server") for p in cut)
    assert [c for p in cut for c in p.columns[2:]] == list(pairs.columns[2:])
    assert {len(p.rows) for p in cut} == {len(pairs.rows)}
    assert max(len(name) for p in cut for row in p.rows for name in row[:2]) <= NAME_CELLS
    assert parts(pairs, 250, framed=True) == [pairs]


def test_a_screen_drops_frames_and_then_says_what_is_below_it():
    assert "╭" in "".join(shown(150, 60))
    plain = shown(150, 32)
    assert "╭" not in "".join(plain) and not any("more lines" in line for line in plain)
    cut = shown(80, 24, num_servers=20)
    assert len(cut) == 24 and re.match(r"\d+ more lines: ", cut[-1])
