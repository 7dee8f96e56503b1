"""Clients and servers on any number of GPUs of one host: trips, goodput, incast, joining, leaving.

    python bench/gpu_scale.py [--gpus N] [--tokens 1,8,32,128,512] [--rounds 1000] [--svg FILE]

Hidden 7168, top-8 of 256 experts, which are dealt out to the servers; dispatch and combine on the
real path with experts that cost nothing (gpu_endpoints.py), from CUDA graphs, one process. Every
split of the GPUs into clients and servers, uniform and Zipf routing, bf16 and fp8 (e4m3 with scales
there, bf16 back).

    p50, p99   of single trips of all clients together, microseconds, each between two events
    link       bytes per trip through the busiest GPU's busier direction over p50, as a share of a
               large peer copy's rate measured in the same run
    nccl       all_to_all_single there and back with the same row counts, in CUDA graphs (bf16)
    incast     clients that all send 512 rows to one server, without and with pacing: a client then
               sends with its share of the blocks
    servers    what sending 128 tokens costs a client, by number of servers
    leave,join one client, 128 tokens, two servers: one stops answering, its experts go to the
               other, then a new one takes them over

The last line is JSON; the picture shows p50 over tokens for each split.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import gpu_nccl
from expertwire.device_structs import KernelStatus
from expertwire.target import GpuTarget
from gpu_endpoints import NUM_EXPERTS, Client, Server, draw, empty_slot, reroute
from gpu_rig import HIDDEN_SIZE, Rounds, capture, percentile, reach_each_other, synchronize

Split = tuple[list[int], list[int]]  # GPUs of the clients and of the servers


def splits(num_gpus: int) -> list[Split]:
    gpus = list(range(num_gpus))
    if num_gpus == 1:
        return [([0], [0])]
    counts = range(1, num_gpus) if num_gpus < 8 else (1, 2, 4, 6, 7)
    return [(gpus[:n], gpus[n:]) for n in counts]


def peer_copy_rate(here: int, there: int) -> float:
    """Bytes per microsecond of a large copy from one GPU to another."""
    source = torch.empty(1 << 28, dtype=torch.uint8, device=f"cuda:{here}").random_()
    target = torch.empty_like(source, device=f"cuda:{there}")
    times = []
    with torch.cuda.device(here):
        for _ in range(6):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            torch.cuda.synchronize(here)
            times.append(1000 * begin.elapsed_time(end))
    return source.numel() / statistics.median(times[1:])


@contextlib.contextmanager
def serving(gpus: Sequence[int], clients: Sequence[Client]):
    servers = [Server(GpuTarget(gpu), idx, clients) for idx, gpu in enumerate(gpus)]
    try:
        yield servers
    finally:
        for server in servers:
            server.close()


def trips(clients: Sequence[Client], servers: Sequence[int], rounds: int) -> list[float]:
    """Microseconds of every trip of every client; all run at the same time."""
    devices = [client.gpu.device.index for client in clients]
    graphs = [Rounds(c.launch.run, d) for c, d in zip(clients, devices, strict=True)]
    synchronize(devices)
    times: list[float] = []
    with serving(servers, clients):
        for replay in range(rounds // graphs[0].per_graph + 1):
            for graph in graphs:
                graph.replay()
            found = [graph.times() for graph in graphs]
            if replay:  # the first one warms up
                times += [us for part in found for us in part]
    synchronize([*devices, *servers])
    for client in clients:
        client.check()
    return times


def measure(split: Split, tokens: int, zipf: bool, fp8: bool, rounds: int, rate: float
            ) -> dict[str, Any]:
    client_gpus, server_gpus = split
    targets = [GpuTarget(gpu) for gpu in server_gpus]
    clients = [Client(GpuTarget(gpu), targets, tokens, fp8=fp8, zipf=zipf, seed=i)
               for i, gpu in enumerate(client_gpus)]
    times = trips(clients, server_gpus, rounds)
    rows = [client.rows_to(len(targets)) for client in clients]
    there = HIDDEN_SIZE * (1 if fp8 else 2)
    columns = zip(*rows, strict=True)
    busiest = max(*(sum(line) for line in rows), *(sum(column) for column in columns))
    p50 = statistics.median(times)
    return {
        "split": f"{len(client_gpus)}:{len(server_gpus)}", "tokens": tokens,
        "routing": "zipf" if zipf else "uniform", "dtype": "fp8" if fp8 else "bf16",
        "p50_us": round(p50, 1), "p99_us": round(percentile(times, 0.99), 1),
        "rows_busiest": busiest, "rows": rows,
        # There and back are one after the other: half of the trip for each direction at best.
        "link_share": round(busiest * (there + HIDDEN_SIZE * 2) / p50 / rate, 3),
        "trips_per_s": round(len(clients) * 1e6 / statistics.mean(times)),
    }


def add_nccl(results: list[dict[str, Any]]) -> None:
    """The bf16 results' row counts as all-to-alls, all of one number of GPUs in one run."""
    worlds: dict[int, list[dict[str, Any]]] = {}
    for result in results:
        if result["dtype"] == "bf16":
            world = sum(map(int, result["split"].split(":")))
            worlds.setdefault(world, []).append(result)
    for world, group in worlds.items():
        matrices = []
        for result in group:
            num_clients = len(result["rows"])
            matrices.append([
                [0] * num_clients + line for line in result["rows"]
            ] + [[0] * world for _ in range(world - num_clients)])
        times = gpu_nccl.all_to_all(matrices, HIDDEN_SIZE * 2)
        for result, us in zip(group, times, strict=True):
            result["nccl_us"] = round(us, 1)


def incast(gpus: Sequence[int], rounds: int) -> dict[str, Any]:
    """Everybody to the last GPU; with two GPUs two clients share the first."""
    homes = list(gpus[:-1]) if len(gpus) > 2 else [gpus[0]] * 2
    facts: dict[str, Any] = {"clients": len(homes)}
    for name, blocks in (("unpaced", None), ("paced", max(1, 128 // len(homes) // 2))):
        clients = [Client(GpuTarget(gpu), [GpuTarget(gpus[-1])], 512, seed=i, blocks=blocks)
                   for i, gpu in enumerate(homes)]
        times = trips(clients, [gpus[-1]], rounds)
        facts[name] = {"p50_us": round(statistics.median(times), 1),
                       "p99_us": round(percentile(times, 0.99), 1)}
    return facts


def cost_per_server(gpus: Sequence[int]) -> dict[int, float]:
    """Microseconds of the send alone, by number of servers (all on the last GPU)."""
    facts = {}
    for count in (1, 2, 4, 8, 16):
        client = Client(GpuTarget(gpus[0]), [GpuTarget(gpus[-1])] * count, 128)
        stream = torch.cuda.Stream(gpus[0])
        graph = capture(stream, [client.send.run] * 20)
        times = []
        with torch.cuda.device(gpus[0]), torch.cuda.stream(stream):
            for _ in range(10):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(50 * begin.elapsed_time(end))
        facts[count] = round(statistics.median(times), 2)
    return facts


def leave_and_join(gpus: Sequence[int], seconds: float = 0.2) -> dict[str, Any]:
    """Trips one by one before, between and after; how long the step took that lost its server."""
    wait_ms = 5.0
    targets = [GpuTarget(gpus[-1])] * 2
    client = Client(GpuTarget(gpus[0]), targets, 128, timeout_ns=int(wait_ms * 1e6))
    stream = torch.cuda.Stream(gpus[0])
    graph = capture(stream, [client.launch.run])
    dealt = [e % 2 for e in range(NUM_EXPERTS)]

    def trip() -> tuple[float, int]:
        begin = time.perf_counter()
        with torch.cuda.device(gpus[0]), torch.cuda.stream(stream):
            graph.replay()
            stream.synchronize()
        took = 1e6 * (time.perf_counter() - begin)
        return took, client.step.status.read_struct(KernelStatus).code

    def run() -> list[float]:
        end, times = time.perf_counter() + seconds, []
        while time.perf_counter() < end:
            took, code = trip()
            if code:
                raise SystemExit(f"leave and join: a trip failed with status {code}")
            times.append(took)
        client.check()
        return times

    everything = range(NUM_EXPERTS)  # either may take all of them
    stay, leaver = (Server(gpu, i, [client], everything) for i, gpu in enumerate(targets))
    servers = [stay, leaver]
    try:
        trip()
        facts: dict[str, Any] = {"before_us": round(statistics.median(run()), 1)}
        leaver.close()
        begin = time.perf_counter()
        _, code = trip()
        reroute(client, [0] * NUM_EXPERTS)
        _, again = trip()
        facts["failed_trips"], facts["wait_ms"] = int(code != 0) + int(again != 0), wait_ms
        facts["step_that_lost_its_server_ms"] = round(1e3 * (time.perf_counter() - begin), 2)
        facts["one_server_us"] = round(statistics.median(run()), 1)
        begin = time.perf_counter()
        empty_slot(client, 1)
        servers.append(Server(targets[1], 1, [client], everything))
        reroute(client, dealt)
        facts["join_ms"] = round(1e3 * (time.perf_counter() - begin), 2)
        facts["after_us"] = round(statistics.median(run()), 1)
    finally:
        for server in servers:
            server.close()
    return facts


def picture(results: list[dict[str, Any]], path: Path) -> None:
    """p50 over tokens, a line per split, routing and dtype; both axes logarithmic."""
    from math import log2

    width, height, left, top = 760, 460, 60, 20
    tokens = sorted({r["tokens"] for r in results})
    most = max(r["p50_us"] for r in results)
    least = min(r["p50_us"] for r in results)
    span = max(1.0, log2(tokens[-1] / tokens[0])), max(1e-6, log2(most / least))

    def at(t: float, us: float) -> tuple[float, float]:
        x = left + (width - left - 190) * log2(t / tokens[0]) / span[0]
        return x, height - 40 - (height - 40 - top) * log2(us / least) / span[1]

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
           'font-family="sans-serif" font-size="11">',
           f'<rect width="{width}" height="{height}" fill="white"/>']
    for t in tokens:
        out.append(f'<text x="{at(t, least)[0]:.0f}" y="{height - 20}">{t}</text>')
    for us in (least, (least * most) ** 0.5, most):
        out.append(f'<text x="8" y="{at(tokens[0], us)[1]:.0f}">{us:.0f} us</text>')
    out.append(f'<text x="{left}" y="{height - 4}">tokens per client (p50 of a trip)</text>')
    lines: dict[str, list[dict[str, Any]]] = {}
    for r in results:
        lines.setdefault(f"{r['split']} {r['routing']} {r['dtype']}", []).append(r)
    for i, (name, line) in enumerate(lines.items()):
        colour = f"hsl({i * 360 // len(lines)},70%,40%)"
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in
                          (at(r["tokens"], r["p50_us"]) for r in line))
        out.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        out.append(f'<text x="{width - 180}" y="{top + 14 * i + 10}" fill="{colour}">{name}</text>')
    path.write_text("\n".join([*out, "</svg>"]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gpus", type=int, help="default: all")
    parser.add_argument("--tokens", default="1,8,32,128,512", help="numbers, with commas")
    parser.add_argument("--rounds", type=int, default=1000, help="trips per client and number")
    parser.add_argument("--svg", type=Path, default=Path("gpu_scale.svg"))
    options = parser.parse_args()
    num_gpus = options.gpus or torch.cuda.device_count()
    if not 1 <= num_gpus <= torch.cuda.device_count():
        sys.exit(f"gpu_scale: {torch.cuda.device_count()} GPUs are here")
    started, gpus = time.monotonic(), list(range(num_gpus))
    draw(1, True, 0)  # fails early where torch cannot
    reach_each_other(gpus)
    rate = peer_copy_rate(gpus[0], gpus[-1])
    results = []
    print(f"{'split':>6} {'tokens':>6} {'routing':>8} {'dtype':>5} {'p50':>8} {'p99':>8} "
          f"{'rows':>6} {'link':>6} {'trips/s':>8}")
    for split in splits(num_gpus):
        for fp8 in (False, True):
            for zipf in (False, True):
                for tokens in map(int, options.tokens.split(",")):
                    r = measure(split, tokens, zipf, fp8, options.rounds, rate)
                    results.append(r)
                    print(f"{r['split']:>6} {tokens:>6} {r['routing']:>8} {r['dtype']:>5} "
                          f"{r['p50_us']:>8} {r['p99_us']:>8} {r['rows_busiest']:>6} "
                          f"{r['link_share']:>6} {r['trips_per_s']:>8}", flush=True)
    facts: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "gpus": num_gpus,
        "peer_copy_gb_per_s": round(rate / 1000, 1), "incast": incast(gpus, options.rounds),
        "send_us_by_servers": cost_per_server(gpus), "leave_and_join": leave_and_join(gpus),
    }
    if num_gpus > 1:
        torch.cuda.empty_cache()
        add_nccl(results)
    for name in ("peer_copy_gb_per_s", "incast", "send_us_by_servers", "leave_and_join"):
        print(f"{name}: {facts[name]}")
    print("nccl all-to-all there and back, us:",
          {f"{r['split']} {r['routing']} {r['tokens']}": r["nccl_us"] for r in results
           if "nccl_us" in r})
    picture(results, options.svg)
    facts.update(results=results, seconds=round(time.monotonic() - started, 1))
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
