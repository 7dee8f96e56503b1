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


@pytest.mark.timeout(0)  # bench/many.py ends by itself
def test_many_servers_and_many_clients_come_up_serve_and_go(request):
    """Each client is connected to each server: the time that it may take grows with both."""
    count = request.config.getoption("--many")
    limit = LIMIT_SECONDS + count * count // 10
    facts = run_many(count, count, max(3, count // 8), limit)
    assert facts["members"] == count and facts["connections"] == count * count
    assert facts["steps"] == 4 * count and facts["wrong"] == 0
    assert facts["bad_exits"] == 0 and facts["sockets_left"] == 0
