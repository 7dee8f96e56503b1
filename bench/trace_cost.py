"""What a trace costs: trips to an echo server, traced and not, in turns in one run.

    python bench/trace_cost.py [--rows 1,32] [--seconds 3] [--json]

Two server processes of `bench/cpu_trip.py`, one of them traced all the time, the other never. This
process is traced while it is the traced one's turn. Medians in microseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import statistics
import tempfile
import time
from pathlib import Path

import torch

from cpu_trip import HIDDEN_SIZE, echo_child, our_trip

TURN = 200  # trips; the first ten are not counted


def run(all_rows: list[int], seconds: float) -> dict:
    from expertwire import Client, Registry
    from expertwire.trace import recorder as trace

    token = secrets.token_hex(32)
    env = {"EXPERTWIRE_TOKEN": token, "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    results: dict[str, dict] = {}
    with contextlib.ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "trace.json"
        trips = {}
        for kind in ("off", "on"):
            registry = stack.enter_context(Registry("127.0.0.1:0", token=token.encode()))
            more = {"EXPERTWIRE_TRACE": str(path)} if kind == "on" else {}
            stack.enter_context(echo_child("ours", registry.address, {**env, **more})).wait_ready()
            client = stack.enter_context(Client(registry, token=token.encode(),
                                                batch_invariant=False))
            client.wait_ready(10)
            trips[kind] = our_trip(client)
        for num_rows in all_rows:
            rows = torch.randn(num_rows, HIDDEN_SIZE).to(torch.bfloat16)
            times: dict[str, list[float]] = {"off": [], "on": []}
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                for kind, trip in trips.items():
                    if kind == "on":
                        trace.start(path, name="client")
                    for i in range(TURN):
                        start = time.perf_counter_ns()
                        trip(rows)
                        if i >= 10:
                            times[kind].append((time.perf_counter_ns() - start) / 1000)
                    trace.stop()
            medians = {kind: statistics.median(found) for kind, found in times.items()}
            results[str(num_rows)] = {
                **{f"{kind}_us": round(us, 1) for kind, us in medians.items()},
                "on_minus_off_us": round(medians["on"] - medians["off"], 1),
                "on_over_off": round(medians["on"] / medians["off"], 3),
            }
    return {"rows": results, "cores": os.cpu_count()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", default="1,32", help="numbers of rows, with commas")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each number of rows")
    parser.add_argument("--json", action="store_true", help="only the JSON line, no table")
    options = parser.parse_args()
    facts = run([int(text) for text in options.rows.split(",")], options.seconds)
    if not options.json:
        print(f"{'rows':>5}{'off us':>10}{'on us':>10}{'on / off':>10}")
        for rows, r in facts["rows"].items():
            print(f"{rows:>5}{r['off_us']:>10.1f}{r['on_us']:>10.1f}{r['on_over_off']:>10.2f}")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
