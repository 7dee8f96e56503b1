"""What a trace costs: trips to an echo server, traced and not, in turns in one run.

    python bench/trace_cost.py [--rows 1,32] [--seconds 10] [--without LIBRARY] [--json]

A client and a server process of each kind: `off`, the same once `again` (what the machine alone
makes of two equal ones), `on` (EXPERTWIRE_TRACE is set for both), and, with --without, a native
library that has no code for traces (cmake -DEXPERTWIRE_TRACE=OFF). In each round every kind has its
turn, in random order; a kind's time over that of `off` is looked at within the round. Medians in
microseconds, of the ratios with the 95 % interval of the median (order statistics).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import secrets
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from cpu_trip import HIDDEN_SIZE, Child, echo_child, our_trip

TURN = 200  # trips; the first ten are not counted


def client(registry: str) -> None:
    """The process of a kind's client: "ROWS" in, the median microseconds of a turn out."""
    from expertwire import Client

    torch.set_num_threads(1)
    with Client(registry, batch_invariant=False) as ours:
        ours.wait_ready(10)
        trip = our_trip(ours)
        print("ready", flush=True)
        for line in sys.stdin:
            rows, times = torch.ones(int(line), HIDDEN_SIZE, dtype=torch.bfloat16), []
            for _ in range(TURN):
                start = time.perf_counter_ns()
                trip(rows)
                times.append((time.perf_counter_ns() - start) / 1000)
            print(statistics.median(times[10:]), flush=True)


def middle(found: list[float]) -> tuple[float, float, float]:
    """The median, and the 95 % interval of the median: ranks n/2 -+ 0.98 sqrt(n), for any
    distribution (the binomial one of how many lie below it)."""
    order, n = sorted(found), len(found)
    away = 0.98 * math.sqrt(n)
    low, high = max(0, math.floor(n / 2 - away)), min(n - 1, math.ceil(n / 2 + away))
    return statistics.median(order), order[low], order[high]


def run(all_rows: list[int], seconds: float, without: str | None) -> dict:
    from expertwire import Registry

    token = secrets.token_hex(32)
    results: dict[str, dict] = {}
    with contextlib.ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "trace.json"
        kinds = {"off": {}, "again": {}, "on": {"EXPERTWIRE_TRACE": str(path)}}
        if without:
            kinds["without"] = {"EXPERTWIRE_LIBRARY": without}
        clients = {}
        for kind, more in kinds.items():
            env = {"EXPERTWIRE_TOKEN": token, "OMP_NUM_THREADS": "1", **more}
            registry = stack.enter_context(Registry("127.0.0.1:0", token=token.encode()))
            stack.enter_context(echo_child("ours", registry.address, env)).wait_ready()
            clients[kind] = stack.enter_context(Child(
                kind, [sys.executable, __file__, "--client", registry.address],
                {**os.environ, **env}))
            clients[kind].wait_ready()
        for num_rows in all_rows:
            turns: dict[str, list[float]] = {kind: [] for kind in kinds}
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                for kind in random.sample(list(kinds), len(kinds)):
                    process = clients[kind].process
                    process.stdin.write(f"{num_rows}\n".encode())
                    process.stdin.flush()
                    turns[kind].append(float(process.stdout.readline()))
            off = turns["off"]
            results[str(num_rows)] = {kind: {
                "us": round(statistics.median(found), 2),
                "over_off": [round(x, 4) for x in middle([a / b for a, b in zip(
                    found, off, strict=True)])],
                "minus_off_us": [round(x, 2) for x in middle([a - b for a, b in zip(
                    found, off, strict=True)])],
            } for kind, found in turns.items()}
            results[str(num_rows)]["rounds"] = len(off)
    return {"rows": results, "cores": os.cpu_count()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", default="1,32", help="numbers of rows, with commas")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each number of rows")
    parser.add_argument("--without", metavar="LIBRARY", help="a native library without traces")
    parser.add_argument("--json", action="store_true", help="only the JSON line, no table")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client(options.client)
        return
    facts = run([int(text) for text in options.rows.split(",")], options.seconds, options.without)
    if not options.json:
        print(f"{'rows':>5}{'kind':>9}{'us':>9}{'over off':>26}{'minus off, us':>26}")
        for rows, kinds in facts["rows"].items():
            print(f"{kinds['rounds']} rounds")
            for kind, r in kinds.items():
                if kind == "rounds":
                    continue
                over, minus = ("{} ({} to {})".format(*r[key]) for key in
                               ("over_off", "minus_off_us"))
                print(f"{rows:>5}{kind:>9}{r['us']:>9.1f}{over:>26}{minus:>26}")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
