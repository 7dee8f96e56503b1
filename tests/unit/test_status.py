"""`expertwire status`: what the tables say, once and live, on a terminal, in a pipe, as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from tests.system.cluster import TOKEN, batch, cluster, model_facts

from expertwire import Registry
from expertwire.observe.status import plain_lines, watch_status
from expertwire.observe.status_tables import micros, rate, size, tables

SECONDS = 20.0  # generous: a loaded machine is no failure


def server(**stats):
    return {"server_id": "s0", "seat": 0, "pid": 7, "experts": [0, 1, 5], "draining": False,
            "model": {"name": "tiny"}, "reports": 2, "silent_s": 0.25, "stats": stats}


def facts(servers=(), clients=()):
    return {"epoch": 9, "uptime_s": 1.0, "servers": list(servers),
            "clients": ["c" for _ in clients], "client_stats": list(clients)}


def cells(name, given):
    """{column: cell} of the first row of a table."""
    table = next(t for t in tables(given) if t.name == name)
    return dict(zip(table.columns, table.rows[0], strict=True))


PAIR = {"rows": 40, "messages": 4, "bytes_sent": 2_500_000, "bytes_received": 1000,
        "bytes_sent_per_s": 1234.0, "p50_us": 812.4, "p99_us": 12_345.0, "wait_ms": 2100.0}
CLIENT = {"client": "attention", "epoch": 9, "rows_per_s": 1500.0, "bytes_sent_per_s": 5e9,
          "queue_depth": 2, "retries": 3, "lost": 1, "errors": {"0x13": 2, "0x15": 1},
          "dropped": {"pairs": 8}, "servers": {"s0": PAIR},
          "stages": {"wait": {"count": 4, "p50_us": 800.0, "p99_us": 1900.0, "total_ms": 5.0}}}


def test_servers_and_their_load():
    given = facts([server(rows=12, refused=1, clients=3, errors={"0x15": 2}, queue_depth=4,
                          rows_per_s=99.6, bytes_received_per_s=1e6, bytes_received=2e9)])
    assert cells("servers", given) == {
        "server": "s0", "seat": "0", "pid": "7", "experts": "0-1,5", "clients": "3", "rows": "12",
        "refused": "1", "errors": "2", "reports": "2", "silent": "0.2 s",
    }
    assert cells("load", given) == {
        "server": "s0", "messages": "0", "rows/s": "100", "in/s": "1 MB", "out/s": "-",
        "in": "2 GB", "out": "-", "queue": "4",
    }


def test_clients_pairs_and_stages():
    given = facts([server(stages={"experts": {"p50_us": 7.0, "p99_us": 70.0}})], [CLIENT])
    shown = cells("clients", given)
    assert (shown["rows/s"], shown["out/s"], shown["queue"]) == ("1.5 k", "5 GB", "2")
    assert (shown["retries"], shown["failovers"], shown["dropped"]) == ("3", "1", "8")
    assert shown["errors"] == "3"
    assert cells("pairs", given) == {
        "client": "attention", "server": "s0", "rows": "40", "sent": "2.5 MB", "received": "1 kB",
        "sent/s": "1.23 kB", "received/s": "-", "wait p50": "812 us", "p99": "12.3 ms",
        "in all": "2.1 s",
    }
    stages = [t for t in tables(given) if t.name.startswith("p50")]
    assert [t.columns[1:] for t in stages] == [("wait",), ("experts",)]
    assert stages[0].rows == [("attention", "800 us / 1.9 ms")]


@pytest.mark.parametrize(("shown", "value", "text"), [
    (rate, 0, "0"), (rate, 999.4, "999"), (rate, 999.6, "1 k"), (rate, 1234567, "1.23 M"),
    (size, 12, "12 B"), (size, 1e12, "1 TB"), (size, 5e15, "5000 TB"), (size, None, "-"),
    (micros, 0.25, "0.25 us"), (micros, 1e6, "1 s"), (micros, "x", "-"), (micros, True, "-"),
])
def test_values_in_few_characters(shown, value, text):
    assert shown(value) == text


def test_what_processes_say_of_themselves_breaks_nothing():
    """The registry passes statistics on as they are: any JSON, and any text."""
    rubbish = [3, "x", None, [], {"a": 1}, True, "\x1b[2J"]
    for value in rubbish:
        stats = dict.fromkeys(("rows", "stages", "errors", "rows_per_s", "queue_depth"), value)
        client = dict.fromkeys(("client", "servers", "stages", "dropped", "retries"), value)
        lines = plain_lines("r", facts([server(**stats)], [client, value]))
        assert all(line.isascii() and line.isprintable() for line in lines)
    nested = {"client": "c", "servers": {"\x1b[2J": {"p50_us": "x"}, "b": 3},
              "stages": {"\x1b": {"p50_us": {}}}}
    assert "\x1b" not in "\n".join(plain_lines("r", facts([], [nested])))


def test_pairs_are_those_with_the_most_bytes():
    many = {f"s{i}": {**PAIR, "bytes_sent": i} for i in range(100)}
    (table,) = [t for t in tables(facts([], [{**CLIENT, "servers": many}])) if t.name == "pairs"]
    assert [row[1] for row in table.rows[:3]] == ["s99", "s98", "s97"] and len(table.rows) == 32


# -------------------------------------------------------------------- live, with processes


def watch(address, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "expertwire", "status", "--watch", "--registry", address,
         *arguments],
        env={**os.environ, "EXPERTWIRE_TOKEN": TOKEN.decode(), "COLUMNS": "130", "LINES": "60",
             "TERM": "xterm"}, **options,
    )


def read_until(fd, pattern):
    shown, deadline = "", time.monotonic() + SECONDS
    while not re.search(pattern, shown):
        assert select.select([fd], [], [], max(0, deadline - time.monotonic()))[0], shown
        with contextlib.suppress(OSError):  # EIO: the child has closed its side
            if data := os.read(fd, 65536):
                shown += data.decode(errors="replace")
                continue
        raise AssertionError(f"it ended without showing {pattern}: {shown}")
    return shown


def test_live_on_a_terminal_until_ctrl_c():
    """The figures move, the cursor comes back, and the screen is what it was."""
    model = model_facts()
    with cluster([range(8)], model) as (client, _, registry):
        client.moe(0, *batch(3, model))
        master, slave = pty.openpty()
        child = watch(registry.address, "--every", "0.1", stdout=slave, stderr=slave)
        os.close(slave)
        try:
            shown = read_until(master, "s0")
            assert "\x1b[?1049h" in shown, "a screen of its own"
            for _ in range(3):
                client.moe(0, *batch(5, model))
            read_until(master, r"s0 .*\b18\b")  # rows: 3 + 3 x 5
            child.send_signal(signal.SIGINT)
            end = read_until(master, r"\?1049l")
            assert "\x1b[?25h" in end, "the cursor is visible again"
            assert child.wait(SECONDS) == 130
        finally:
            child.kill()
            child.wait()
            os.close(master)


def test_looks_without_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("EXPERTWIRE_TOKEN", TOKEN.decode())
    with cluster([range(8)]) as (client, _, registry):
        watch_status(registry.address, seconds=0.1, looks=2)
        blocks = capsys.readouterr().out.strip().split("\n\n")
        assert sum("registry 127" in block for block in blocks) == 2
        assert any(block.startswith("server ") or "\nserver " in block for block in blocks)
        watch_status(registry.address, seconds=0.1, looks=2, as_json=True)
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["servers"][0]["server_id"] == "s0" and second["uptime_s"] > first["uptime_s"]
    assert client.name in first["clients"]


def test_a_registry_that_goes_away_is_waited_for(capsys, monkeypatch):
    monkeypatch.setenv("EXPERTWIRE_TOKEN", TOKEN.decode())
    with Registry(token=TOKEN) as registry:
        address, pauses = registry.address, []

        def pause(seconds):
            pauses.append(seconds)
            if len(pauses) == 1:
                registry.close()

        monkeypatch.setattr("expertwire.observe.status.time.sleep", pause)
        watch_status(address, seconds=0.5, looks=2, as_json=True)
    facts_line, away = map(json.loads, capsys.readouterr().out.splitlines())
    assert facts_line["epoch"] and "nothing answers" in away["away"]
    assert pauses[0] == 0.5


def test_a_reader_that_leaves_ends_it():
    with Registry(token=TOKEN) as registry:
        child = watch(registry.address, "--every", "0.1", stdout=subprocess.PIPE,
                      stderr=subprocess.PIPE)
        try:
            assert child.stdout is not None and child.stderr is not None
            assert child.stdout.readline()
            child.stdout.close()
            assert child.wait(SECONDS) in (1, 141)
            assert child.stderr.read() == b""
        finally:
            child.kill()
            child.wait()
            child.stderr.close()
