"""A round trip of T rows of 7168 bf16 between two processes of one machine, without experts.

    python bench/cpu_trip.py [--rows 1,8,32,128,512] [--seconds 2] [--json]

In one run, in turns, so that noise of the machine hits all alike:

    ours    client.moe -> work queue -> echo server -> work queue -> combine   (do_ibgda=True)
    direct  the same with plain stores into the peer's mapped memory           (do_ibgda=False)
    gloo    torch.distributed gloo send and recv of the same bytes, over the loopback device
    grpc    gRPC unary call, bytes in and out, over the loopback device
    memcpy  two memcpys of the same bytes in this process: what moving them costs at the very least

Each turn makes a few trips with each competitor and drops the first, which wakes the other side.
The numbers are medians in microseconds; the JSON has 10th percentiles too. Needs
grpcio (`pip install '.[bench]'`).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from child import Child, end_with_parent

HIDDEN_SIZE = 7168
# Messages of 16 rows (229 kB), four in flight: packing, moving and combining overlap, and what is
# moved stays in the caches. A server of real experts wants larger messages (the default, 256 rows).
MAX_ROWS, NUM_SLOTS = 16, 4
BURST = 5  # trips per competitor and turn; the first is not counted
COMPETITORS = ("ours", "direct", "gloo", "grpc", "memcpy")
GRPC_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
GRPC_METHOD = "/bench.Echo/Echo"

Trip = Callable[[torch.Tensor], torch.Tensor]


# ------------------------------------------------------------------ the other processes


def serve_ours(registry: str) -> None:
    from expertwire import Server
    from expertwire.server.echo import EchoShard, echo_model

    with Server(EchoShard(), echo_model(HIDDEN_SIZE, "bfloat16"), registry) as server:
        server.wait_registered(10)
        print("ready", flush=True)
        server.serve_forever()


def serve_gloo(store: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=1, world_size=2)
    plan = torch.zeros(2, dtype=torch.int64)
    buffer = torch.empty(0, dtype=torch.uint8)
    print("ready", flush=True)
    while True:
        dist.recv(plan, 0)
        num_bytes, num_trips = plan.tolist()
        if buffer.numel() != num_bytes:
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
        for _ in range(num_trips):
            dist.recv(buffer, 0)
            dist.send(buffer, 0)


def serve_grpc(_: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    server = grpc.server(ThreadPoolExecutor(1), options=GRPC_OPTIONS)
    echo = grpc.unary_unary_rpc_method_handler(lambda request, _context: request)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("bench.Echo", {"Echo": echo}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"ready {port}", flush=True)
    server.wait_for_termination()


SERVERS = {"ours": serve_ours, "gloo": serve_gloo, "grpc": serve_grpc}


def echo_child(kind: str, argument: str, env: dict[str, str]) -> Child:
    """One of the servers above in its own process."""
    command = [sys.executable, __file__, "--serve", kind, argument]
    return Child(kind, command, {**os.environ, **env})


# ------------------------------------------------------------------ the competitors


def our_trip(client: Any) -> Trip:
    ids, weights = {}, {}

    def trip(rows: torch.Tensor) -> torch.Tensor:
        count = rows.shape[0]
        if count not in ids:
            ids[count] = torch.zeros(count, 1, dtype=torch.int64)
            weights[count] = torch.ones(count, 1)
        return client.moe(0, rows, ids[count], weights[count])

    return trip


class GlooTrip:
    """Says in a message of its own what will come, outside of what is timed."""

    def __init__(self, store: str):
        import torch.distributed as dist

        self._dist = dist
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=2)

    def announce(self, num_bytes: int, num_trips: int) -> None:
        self._dist.send(torch.tensor([num_bytes, num_trips]), 1)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        self._dist.send(rows.view(torch.uint8), 1)
        output = torch.empty_like(rows)
        self._dist.recv(output.view(torch.uint8), 1)
        return output


def grpc_trip(port: str) -> Trip:
    import grpc

    channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=GRPC_OPTIONS)
    call = channel.unary_unary(GRPC_METHOD)

    def trip(rows: torch.Tensor) -> torch.Tensor:
        reply = call(rows.view(torch.uint8).numpy().tobytes())
        return torch.frombuffer(bytearray(reply), dtype=rows.dtype).view(rows.shape)

    return trip


def memcpy_trip() -> Trip:
    buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def trip(rows: torch.Tensor) -> torch.Tensor:
        num_bytes = rows.numel() * rows.element_size()
        if num_bytes not in buffers:
            buffers[num_bytes] = torch.empty_like(rows), torch.empty_like(rows)
        there, back = buffers[num_bytes]
        ctypes.memmove(there.data_ptr(), rows.data_ptr(), num_bytes)
        ctypes.memmove(back.data_ptr(), there.data_ptr(), num_bytes)
        return back

    return trip


# ------------------------------------------------------------------ measuring


def measure(trips: dict[str, Trip], gloo: GlooTrip, num_rows: int, seconds: float) -> dict:
    """Medians in microseconds by competitor, in turns of a shuffled order."""
    rows = torch.randn(num_rows, HIDDEN_SIZE).to(torch.bfloat16)
    num_bytes = rows.numel() * rows.element_size()
    times: dict[str, list[float]] = {name: [] for name in COMPETITORS}
    order = list(COMPETITORS)
    shuffle = random.Random(num_rows)
    for name in COMPETITORS:  # warm up, and check that the rows come back as they are
        if name == "gloo":
            gloo.announce(num_bytes, 10)
        for _ in range(10):
            if not torch.equal(trips[name](rows), rows):
                raise SystemExit(f"{name}: other rows came back")
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times["ours"]) < 20:
        shuffle.shuffle(order)
        for name in order:
            if name == "gloo":
                gloo.announce(num_bytes, BURST)
            for i in range(BURST):
                start = time.perf_counter_ns()
                trips[name](rows)
                if i:
                    times[name].append((time.perf_counter_ns() - start) / 1000)
    result: dict[str, Any] = {
        f"{name}_us": round(statistics.median(values), 1) for name, values in times.items()
    }
    for name, values in times.items():  # what a quiet machine would show more often
        result[f"{name}_p10_us"] = round(statistics.quantiles(values, n=10)[0], 1)
    return {**result, "bytes": num_bytes, "trips": len(times["ours"])}


def ratios(results: dict[str, dict]) -> dict[str, dict[str, float]]:
    """How many times faster than gloo and gRPC, how far from memcpy, for each number of rows."""
    pairs = {
        "gloo_over_ours": ("gloo_us", "ours_us"), "grpc_over_ours": ("grpc_us", "ours_us"),
        "ours_over_memcpy": ("ours_us", "memcpy_us"),
        "gloo_over_direct": ("gloo_us", "direct_us"), "grpc_over_direct": ("grpc_us", "direct_us"),
        "direct_over_memcpy": ("direct_us", "memcpy_us"),
    }
    return {
        name: {rows: round(facts[a] / facts[b], 2) for rows, facts in results.items()}
        for name, (a, b) in pairs.items()
    }


def run(all_rows: list[int], seconds: float) -> dict[str, Any]:
    from expertwire import Client, Registry
    from expertwire.observe.stats import StageTimes

    token = secrets.token_hex(32)
    env = {"EXPERTWIRE_TOKEN": token, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    os.environ.update(env)
    torch.set_num_threads(1)
    results = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        store = str(Path(folder) / "store")
        registry = stack.enter_context(Registry("127.0.0.1:0", token=token.encode()))
        children = {
            kind: stack.enter_context(echo_child(kind, argument, env))
            for kind, argument in (("ours", registry.address), ("gloo", store), ("grpc", ""))
        }
        gloo = GlooTrip(store)
        facts = {kind: child.wait_ready() for kind, child in children.items()}
        clients = {
            name: stack.enter_context(
                Client(registry, token=token.encode(), batch_invariant=False, do_ibgda=do_ibgda,
                       max_rows=MAX_ROWS, num_slots=NUM_SLOTS)
            )
            for name, do_ibgda in (("ours", True), ("direct", False))
        }
        for client in clients.values():
            client.wait_ready(10)
        trips: dict[str, Trip] = {
            **{name: our_trip(client) for name, client in clients.items()},
            "gloo": gloo, "grpc": grpc_trip(facts["grpc"][0]), "memcpy": memcpy_trip(),
        }
        for num_rows in all_rows:
            for client in clients.values():
                client.times = StageTimes()
            results[str(num_rows)] = measure(trips, gloo, num_rows, seconds)
            stages = clients["ours"].times.summary()
            results[str(num_rows)]["stages_us"] = {s: stages[s]["p50_us"] for s in stages}
    return {
        "rows": results, **ratios(results), "hidden_size": HIDDEN_SIZE, "dtype": "bfloat16",
        "cores": os.cpu_count(), "max_rows": MAX_ROWS, "num_slots": NUM_SLOTS,
    }


def print_tables(facts: dict[str, Any]) -> None:
    head = f"{'rows':>5} {'kB':>8}" + "".join(f"{name + ' us':>11}" for name in COMPETITORS)
    print(head + f"{'gloo/ours':>11}{'grpc/ours':>11}{'ours/memcpy':>13}{'direct/memcpy':>15}")
    for rows, r in facts["rows"].items():
        print(f"{rows:>5} {r['bytes'] / 1000:>8.1f}"
              + "".join(f"{r[name + '_us']:>11.1f}" for name in COMPETITORS)
              + f"{facts['gloo_over_ours'][rows]:>11.2f}{facts['grpc_over_ours'][rows]:>11.2f}"
              f"{facts['ours_over_memcpy'][rows]:>13.2f}{facts['direct_over_memcpy'][rows]:>15.2f}")
    print("\nstages of ours at the client, median us per message")
    stages = list(next(iter(facts["rows"].values()))["stages_us"])
    print(f"{'rows':>5}" + "".join(f"{stage:>10}" for stage in stages))
    for rows, r in facts["rows"].items():
        print(f"{rows:>5}" + "".join(f"{r['stages_us'].get(s, 0.0):>10.1f}" for s in stages))
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", default="1,8,32,128,512", help="numbers of rows, with commas")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each number of rows")
    parser.add_argument("--json", action="store_true", help="only the JSON line, no tables")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        end_with_parent()
        torch.set_num_threads(1)
        SERVERS[options.serve[0]](options.serve[1])
        return
    facts = run([int(text) for text in options.rows.split(",")], options.seconds)
    if not options.json:
        print_tables(facts)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
