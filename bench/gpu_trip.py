"""A round trip of T rows of 7168 bf16 between a client's GPU and a server's, or inside one GPU.

    python bench/gpu_trip.py [--gpus 2] [--rows 1,8,32,128,512] [--replays 40]

Everything runs from CUDA graphs, several trips a graph; the server answers with the rows it got.
One process drives both GPUs, which reach each other's memory.

    ours    client_send_direct, client_combine | server_echo_in_place: launches of many blocks
    judged  the same, but the client judges a reply's head before it adds its rows, not meanwhile
    cut     the same as 2, 4 or 8 messages of as many slots, side by side: branches of the graphs,
            so that sending, answering and adding overlap and nothing waits for all blocks
    send_us, combine_us  (in the JSON) the client's launches alone, each a launch's cost included
    parts   the same with server_poll and server_reply_in_place instead of the one launch
    floor   a bare copy and flag there and back, one kernel a side (gpu_floor.cu)
    single  route, pack, put, combine and the server's kernels as one block each, the older form
    wqe     route, pack and combine of many blocks, puts through work queues in GPU memory that an
            HCA kernel of one block a side executes (two GPUs only)
    nccl    send and receive by torch.distributed, two processes, in CUDA graphs (two GPUs only)

Block counts of ours and floor are the best of a few, stated; so is the number of messages of cut.
Medians and 99th percentiles in microseconds over graph replays, each divided by the trips of a
graph; "round" is the median and 99th percentile of 1000 single trips, each between two events of
its graph, which lengthens it. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import gpu_nccl
import gpu_queues
from expertwire.cuda.pinned import PinnedBuffer
from expertwire.loopback import Loopback, StepShape, Wire
from expertwire.target import GpuTarget
from gpu_rig import (
    HIDDEN_SIZE,
    TIMEOUT_NS,
    TRIPS,
    WARPS,
    Floor,
    Pair,
    Rounds,
    capture,
    check,
    percentile,
    reach_each_other,
    synchronize,
)

GRIDS = (1, 2, 4, 8, 16, 32, 64, 128)
CUTS = (2, 4, 8)


class Bench:
    """client, server: the two sides' GPUs, which may be the same."""

    def __init__(self, client: GpuTarget, server: GpuTarget, replays: int):
        self.client, self.server, self.replays = client, server, replays
        self.devices = client.device.index, server.device.index
        self.floor = Floor(client, server)
        self.failed = PinnedBuffer(64)

    def make(self, num_rows: int, *, in_place: bool, wire: Any = Wire) -> Loopback:
        hidden = torch.randn(num_rows, HIDDEN_SIZE).to(torch.bfloat16)
        step = Loopback(
            self.client, StepShape(num_rows, HIDDEN_SIZE, 1, 1, [[0]]), hidden,
            torch.zeros(num_rows, 1, dtype=torch.int64), torch.ones(num_rows, 1),
            in_place=in_place, timeout_ns=TIMEOUT_NS, server_targets=[self.server], wire=wire,
        )
        step.servers[0].reply_args.expert_output = 0  # echo
        step.combine.failed = self.failed.addr if in_place else 0
        synchronize(self.devices)
        return step

    def launches(self, step: Loopback, grid: int, *, parts: bool = False) -> tuple[Any, Any]:
        with torch.cuda.device(self.devices[0]):
            client = self.client.prepare(
                [("client_send_direct", step.send_args), ("client_combine", step.combine)],
                grid=[grid + 1, grid], warps=WARPS)  # one block more writes the tables
        server = step.servers[0]
        with torch.cuda.device(self.devices[1]):
            if parts:
                serve = self.server.prepare(
                    [("server_poll", server.poll), ("server_reply_in_place", server.reply_args)],
                    grid=[1, grid], warps=[1, WARPS])
            else:
                serve = self.server.prepare([("server_echo_in_place", server.echo)], grid=grid,
                                            warps=WARPS)
        return client, serve

    def ours(self, num_rows: int, grid: int, *, parts: bool = False, judged: bool = False
             ) -> list[float]:
        step = self.make(num_rows, in_place=True)
        if judged:
            step.combine.failed = 0
        client, serve = self.launches(step, grid, parts=parts)
        pair = Pair([client.run] * TRIPS, [serve.run] * TRIPS, devices=self.devices)
        step.output.tensor.fill_(0xEE)
        times = pair.measure(self.replays)
        check(step, "ours")
        return times

    def alone(self, num_rows: int, grid: int) -> dict[str, float]:
        """Microseconds of the client's two launches by themselves: no one is waited for."""
        step = self.make(num_rows, in_place=True)
        client, serve = self.launches(step, grid)
        Pair([client.run], [serve.run], devices=self.devices).measure(1)
        check(step, "alone")
        with torch.cuda.device(self.devices[0]):
            kernels = {
                "combine_us": self.client.prepare([("client_combine", step.combine)], grid=grid,
                                                  warps=WARPS),
                "send_us": self.client.prepare([("client_send_direct", step.send_args)],
                                               grid=grid + 1, warps=WARPS),
            }
        return {
            name: round(statistics.median(
                Pair([kernel.run] * TRIPS, None, devices=self.devices).measure(10)), 2)
            for name, kernel in kernels.items()
        }

    def cut(self, num_rows: int, grid: int, num_messages: int) -> list[float]:
        """The batch as several messages, each with its slot and a share of the blocks."""
        steps = [self.make(num_rows // num_messages, in_place=True) for _ in range(num_messages)]
        sides = [self.launches(step, max(1, grid // num_messages)) for step in steps]
        trip = SideBySide([client.run for client, _ in sides], self.devices[0])
        # A slot's answers follow one another; the slots do not wait for each other.
        answers = SideBySide([functools.partial(_repeat, serve.run) for _, serve in sides],
                             self.devices[1])
        pair = Pair([trip.run] * TRIPS, [answers.run], devices=self.devices)
        for step in steps:
            step.output.tensor.fill_(0xEE)
        times = pair.measure(self.replays)
        for step in steps:
            check(step, f"{num_messages} messages")
        return times

    def rounds(self, num_rows: int, grid: int, count: int = 1000) -> list[float]:
        """Microseconds of each of `count` trips."""
        step = self.make(num_rows, in_place=True)
        client, serve = self.launches(step, grid)
        rounds = Rounds(client.run, self.devices[0])
        stream = torch.cuda.Stream(self.devices[1])
        graph = capture(stream, [serve.run] * rounds.per_graph)
        times: list[float] = []
        for _ in range(count // rounds.per_graph + 1):
            with torch.cuda.device(self.devices[1]), torch.cuda.stream(stream):
                graph.replay()
            rounds.replay()
            times += rounds.times()
            synchronize(self.devices)
        check(step, "rounds")
        return times[rounds.per_graph :]

    def single(self, num_rows: int, *, wire: Any = Wire, grid: int = 1) -> tuple[list[float], Any]:
        """The kernels of one block each; with a wire of its own, puts through its work queues."""
        step = self.make(num_rows, in_place=False, wire=wire)
        queues = wire is not Wire
        server, put = step.servers[0], "client_put_ibgda" if queues else "client_put_direct"
        with torch.cuda.device(self.devices[0]):
            client = self.client.prepare(
                [("client_route", step.route), ("client_pack", step.pack), (put, step.put),
                 ("client_combine", step.combine)], grid=[1, grid, 1, grid], warps=WARPS)
        with torch.cuda.device(self.devices[1]):
            reply = "server_reply_ibgda" if queues else "server_reply_direct"
            serve = self.server.prepare(
                [("server_poll", server.poll), (reply, server.reply_args)], warps=[1, 32])

        def send(seq: int) -> None:
            step.set_seq(seq)  # by value: every trip of the graph has its own
            client.run()

        def rewind() -> None:
            for block, offset in ((server.recv, server.recv.num_bytes - 16),
                                  (step.replies[0], step.replies[0].num_bytes - 16),
                                  (server.slot, 48)):
                block.tensor[offset : offset + 8].zero_()

        pair = Pair([functools.partial(send, i + 1) for i in range(TRIPS)], [serve.run] * TRIPS,
                    rewind, self.devices)
        with contextlib.ExitStack() as stack:
            if queues:
                for side in (step.wires[0], server.wire):
                    stack.enter_context(gpu_queues.hca_kernel(side))
            times = pair.measure(self.replays)
        check(step, "work queues" if queues else "single block")
        return times, step


class SideBySide:
    """Each of `runs` on a stream of its own, after and before all else on the current one."""

    def __init__(self, runs: Sequence[Callable[[], None]], device: int):
        self._branches = [(run, torch.cuda.Stream(device)) for run in runs]

    def run(self) -> None:
        here = torch.cuda.current_stream()
        for run, stream in self._branches:
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                run()
        for _, stream in self._branches:
            here.wait_stream(stream)


def _repeat(run: Callable[[], None]) -> None:
    for _ in range(TRIPS):
        run()


def best(measure: Callable[[int], list[float]], grids: tuple[int, ...]) -> dict[str, Any]:
    """The fastest block count's median and 99th percentile."""
    results = []
    for grid in grids:
        times = measure(grid)
        results.append((statistics.median(times), percentile(times, 0.99), grid))
    us, p99, grid = min(results)
    return {"us": round(us, 2), "p99_us": round(p99, 2), "blocks": grid}


def best_cut(bench: Bench, num_rows: int) -> dict[str, Any] | None:
    """The fastest way to cut a batch; None where a message would hold less than 8 rows, or where
    the branches did not run side by side."""
    found = []
    for count in CUTS:
        for grid in (64, 128):
            if num_rows < 8 * count:
                continue
            try:
                times = bench.cut(num_rows, grid, count)
            except SystemExit as err:  # the other numbers are worth having
                print(f"gpu_trip: {err}", flush=True)
                continue
            found.append({"us": round(statistics.median(times), 2), "messages": count,
                          "p99_us": round(percentile(times, 0.99), 2), "blocks": grid})
    return min(found, key=lambda facts: facts["us"], default=None)


def grids_for(num_rows: int) -> tuple[int, ...]:
    """Block counts worth trying: 7 pieces a row, 8 of them a block."""
    return tuple(g for g in GRIDS if num_rows / 8 <= g <= 4 * num_rows)


def measure_rows(bench: Bench, num_rows: int, nccl: float | None) -> dict[str, Any]:
    grids = grids_for(num_rows)
    facts: dict[str, Any] = {
        "ours": best(functools.partial(bench.ours, num_rows), grids),
        "floor": best(lambda grid: bench.floor.measure(num_rows, bench.replays, grid), grids),
    }
    blocks = facts["ours"]["blocks"]
    facts["judged_us"] = round(statistics.median(bench.ours(num_rows, blocks, judged=True)), 2)
    facts["cut"] = best_cut(bench, num_rows)
    facts |= bench.alone(num_rows, blocks)
    facts["parts_us"] = round(statistics.median(bench.ours(num_rows, blocks, parts=True)), 2)
    rounds = bench.rounds(num_rows, blocks)
    facts["round_us"] = round(statistics.median(rounds), 2)
    facts["round_p99_us"] = round(percentile(rounds, 0.99), 2)
    facts["single_us"] = round(statistics.median(bench.single(num_rows)[0]), 1)
    if bench.devices[0] != bench.devices[1]:
        times, _ = bench.single(num_rows, wire=gpu_queues.HcaWire, grid=min(64, max(1, num_rows)))
        facts["wqe_us"] = round(statistics.median(times), 1)
    facts["ours_over_floor"] = round(facts["ours"]["us"] / facts["floor"]["us"], 3)
    if nccl is not None:
        facts["nccl_us"] = round(nccl, 1)
        fastest = min(facts["ours"]["us"], *([facts["cut"]["us"]] if facts["cut"] else []))
        facts["nccl_over_ours"] = round(nccl / facts["ours"]["us"], 2)
        facts["nccl_over_fastest"] = round(nccl / fastest, 2)
    return facts


def main() -> None:
    available = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=min(2, available or 1),
                        help="1: client and server on one GPU; default: 2 where there are so many")
    parser.add_argument("--rows", default="1,8,32,128,512", help="numbers of rows, with commas")
    parser.add_argument("--replays", type=int, default=40, help="graph replays per number")
    options = parser.parse_args()
    if available < options.gpus:
        sys.exit(f"gpu_trip: {options.gpus} GPUs asked for, {available} are here")
    started = time.monotonic()
    all_rows = [int(text) for text in options.rows.split(",")]
    nccl: dict[int, float] = {}
    if options.gpus > 1:
        nccl = dict(zip(all_rows, gpu_nccl.send_receive(all_rows, HIDDEN_SIZE * 2), strict=True))
    devices = [0, options.gpus - 1]
    reach_each_other(devices)
    bench = Bench(GpuTarget(devices[0]), GpuTarget(devices[1]), options.replays)
    facts: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "gpus": len(set(devices)), "trips_per_graph": TRIPS,
        "threads_per_block": 32 * WARPS, "rows": {},
    }
    print(f"{'rows':>5} {'kB':>8} {'ours':>8} {'p99':>8} {'blocks':>6} {'floor':>8} {'blocks':>6} "
          f"{'ratio':>6} {'judged':>8} {'cut':>8} {'parts':>8} {'round':>8} {'p99':>8} "
          f"{'single':>8} {'wqe':>8} {'nccl':>8}")
    for num_rows in all_rows:
        row = facts["rows"][num_rows] = measure_rows(bench, num_rows, nccl.get(num_rows))
        ours, bare = row["ours"], row["floor"]
        print(f"{num_rows:>5} {num_rows * HIDDEN_SIZE * 2 / 1000:>8.1f} {ours['us']:>8} "
              f"{ours['p99_us']:>8} {ours['blocks']:>6} {bare['us']:>8} {bare['blocks']:>6} "
              f"{row['ours_over_floor']:>6} {row['judged_us']:>8} "
              f"{(row['cut'] or {'us': '-'})['us']:>8} {row['parts_us']:>8} {row['round_us']:>8} "
              f"{row['round_p99_us']:>8} {row['single_us']:>8} {row.get('wqe_us', '-'):>8} "
              f"{row.get('nccl_us', '-'):>8}", flush=True)
    facts["queues"] = gpu_queues.measure(len(set(devices)))
    for name, value in facts["queues"].items():
        print(f"{name}: {value}")
    facts["seconds"] = round(time.monotonic() - started, 1)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
