"""Many servers and many clients on one host: all come up, serve, go, and leave nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "many.py"
LIMIT_SECONDS = 60


def run_many(servers: int, clients: int, per_process: int, limit: int) -> dict:
    """What bench/many.py says; it ends with an error by itself when the limit has passed."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(BENCH), "--servers", str(servers), "--clients", str(clients),
         "--steps", "4", "--per-process", str(per_process), "--limit", str(limit), "--json"],
        capture_output=True, text=True, timeout=limit + 60, check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    print(round(time.monotonic() - start, 1), facts)
    return facts


def check(facts: dict, servers: int, clients: int) -> None:
    assert facts["members"] == servers and facts["connections"] == servers * clients
    assert facts["steps"] == 4 * clients and facts["wrong"] == 0
    assert facts["bad_exits"] == 0 and facts["sockets_left"] == 0


@pytest.mark.timeout(LIMIT_SECONDS + 90)
def test_many_servers_and_many_clients_come_up_serve_and_go():
    check(run_many(12, 12, 3, LIMIT_SECONDS), 12, 12)
