"""A round trip of T rows of 7168 bf16 between two hosts over TCP, without experts.

    python bench/net_trip.py [--rows 1,8,32,128,512] [--seconds 2] [--json] [--one-host]

The hosts are two network namespaces with a veth pair between them (root is needed); --one-host goes
over the loopback device instead. In one run, in turns, so that noise of the machine hits all alike:

    ours    client.moe -> work queue -> UCX -> echo server -> UCX -> combine     (hca="ucx")
    gloo    torch.distributed gloo send and recv of the same bytes over TCP
    grpc    gRPC unary call, bytes in and out
    ucx     ucx_perftest of the libucx wheel: ucp_am_lat with the same bytes and UCX settings, twice
            its one-way time; no packing, no combining: what UCX needs at the very least. It
            spins at both ends (`ucx poll`; with two cores and other work the median of a run may
            be that of the scheduler), or sleeps as ours does (`ucx sleep`)

Medians in microseconds. Needs `pip install '.[bench,ucx]'`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import re
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from child import Child, end_with_parent

HIDDEN_SIZE = 7168
MAX_ROWS, NUM_SLOTS = 16, 4
BURST = 5  # trips per competitor and turn; the first is not counted
COMPETITORS = ("ours", "gloo", "grpc")
TABLE = (*COMPETITORS, "ucx_poll", "ucx_sleep")
GRPC_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
GRPC_METHOD = "/bench.Echo/Echo"

Trip = Callable[[torch.Tensor], torch.Tensor]


# ------------------------------------------------------------------ hosts


class Hosts:
    """"a" measures and "b" echoes: namespaces of their own, or both this host."""

    def __init__(self, one_host: bool):
        self.one_host = one_host
        self._name = f"ew-trip-{os.getpid()}"
        self.device = "lo" if one_host else "eth0"

    def space(self, host: str) -> str:
        return f"{self._name}-{host}"

    def address(self, host: str) -> str:
        return "127.0.0.1" if self.one_host else {"a": "10.78.0.1", "b": "10.78.0.2"}[host]

    def command(self, host: str, *args: str) -> list[str]:
        return [*([] if self.one_host else ["ip", "netns", "exec", self.space(host)]), *args]

    @contextlib.contextmanager
    def up(self) -> Iterator[Hosts]:
        def ip(*args: str) -> None:
            done = subprocess.run(["ip", *args], capture_output=True, text=True, timeout=30)
            if done.returncode:
                raise SystemExit(f"ip {' '.join(args)}: {done.stderr.strip()}; without root use "
                                 "--one-host")

        with contextlib.ExitStack() as undo:
            if not self.one_host:
                for host in "ab":
                    ip("netns", "add", self.space(host))
                    undo.callback(ip, "netns", "del", self.space(host))
                ip("link", "add", "eth0", "netns", self.space("a"), "type", "veth",
                   "peer", "name", "eth0", "netns", self.space("b"))
                for host in "ab":
                    space = self.space(host)
                    ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
                    ip("-n", space, "link", "set", "lo", "up")
                    ip("-n", space, "link", "set", "eth0", "up")
            yield self


# ------------------------------------------------------------------ host b


def serve_ours(registry: str, _: str) -> None:
    from expertwire import Server
    from expertwire.server.echo import EchoShard, echo_model

    model = echo_model(HIDDEN_SIZE, "bfloat16")
    with Server(EchoShard(), model, registry, hca="ucx") as server:
        server.wait_registered(20)
        print("ready", flush=True)
        server.serve_forever()


def serve_gloo(store: str, _: str) -> None:
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


def serve_grpc(_: str, host: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    server = grpc.server(ThreadPoolExecutor(1), options=GRPC_OPTIONS)
    echo = grpc.unary_unary_rpc_method_handler(lambda request, _context: request)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("bench.Echo", {"Echo": echo}),)
    )
    port = server.add_insecure_port(f"{host}:0")
    server.start()
    print(f"ready {port}", flush=True)
    server.wait_for_termination()


SERVERS = {"ours": serve_ours, "gloo": serve_gloo, "grpc": serve_grpc}


def echo_child(hosts: Hosts, kind: str, argument: str) -> Child:
    """One of the servers above in a process of host b."""
    return Child(kind, hosts.command("b", sys.executable, __file__, "--serve", kind, argument,
                                     hosts.address("b")))


# ------------------------------------------------------------------ host a


def our_trip(client: Any) -> Trip:
    given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def trip(rows: torch.Tensor) -> torch.Tensor:
        count = rows.shape[0]
        if count not in given:
            given[count] = torch.zeros(count, 1, dtype=torch.int64), torch.ones(count, 1)
        return client.moe(0, rows, *given[count])

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


def grpc_trip(address: str) -> Trip:
    import grpc

    channel = grpc.insecure_channel(address, options=GRPC_OPTIONS)
    call = channel.unary_unary(GRPC_METHOD)

    def trip(rows: torch.Tensor) -> torch.Tensor:
        reply = call(rows.view(torch.uint8).numpy().tobytes())
        return torch.frombuffer(bytearray(reply), dtype=rows.dtype).view(rows.shape)

    return trip


class Perftest:
    """ucx_perftest of the wheel, server on host b, client on host a."""

    def __init__(self, hosts: Hosts):
        spec = importlib.util.find_spec("libucx")
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit("no libucx wheel, so no ucx_perftest: pip install '.[ucx]'")
        folder = Path(spec.submodule_search_locations[0])
        self._program = str(folder / "bin" / "ucx_perftest")
        self._env = {**os.environ, "LD_LIBRARY_PATH": str(folder / "lib"), "UCX_TLS": "tcp",
                     "UCX_WARN_UNUSED_ENV_VARS": "n"}
        self._hosts = hosts

    def trip_us(self, num_bytes: int, seconds: float, mode: str) -> float:
        """Median of there and back again in microseconds."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        count = str(max(50, min(2000, int(seconds * 1e9 / (100_000 + num_bytes)))))
        test = ["-t", "ucp_am_lat", "-s", str(num_bytes), "-n", count, "-w", "10", "-p", port, "-f",
                "-E", mode]
        server = subprocess.Popen(
            self._hosts.command("b", self._program, "-p", port, "-E", mode), env=self._env,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        try:
            for _ in range(50):
                done = subprocess.run([self._program, self._hosts.address("b"), *test],
                                      env=self._env, capture_output=True, text=True, timeout=60)
                found = re.findall(r"^\s*\d+\s+([\d.]+)\s+[\d.]+\s+[\d.]+", done.stdout, re.M)
                if done.returncode == 0 and found:
                    return 2 * float(found[-1])
                time.sleep(0.1)  # it does not listen yet
            raise SystemExit(f"ucx_perftest failed: {done.stdout}{done.stderr}")
        finally:
            server.kill()
            server.wait()


def measure(
    trips: dict[str, Trip], gloo: GlooTrip, raw: Perftest, num_rows: int, seconds: float
) -> dict[str, Any]:
    """Medians in microseconds by competitor, in turns of a shuffled order."""
    rows = torch.randn(num_rows, HIDDEN_SIZE).to(torch.bfloat16)
    num_bytes = rows.numel() * rows.element_size()
    times: dict[str, list[float]] = {name: [] for name in TABLE}
    order, shuffle = list(COMPETITORS), random.Random(num_rows)
    for name in COMPETITORS:  # warm up, and check that the rows come back as they are
        if name == "gloo":
            gloo.announce(num_bytes, 10)
        for _ in range(10):
            if not torch.equal(trips[name](rows), rows):
                raise SystemExit(f"{name}: other rows came back")
    for _ in range(3):  # raw UCX between the turns of the others
        for mode in ("poll", "sleep"):
            times[f"ucx_{mode}"].append(raw.trip_us(num_bytes, seconds / 6, mode))
        end = time.monotonic() + seconds / 3
        while time.monotonic() < end or len(times["ours"]) < 12:
            shuffle.shuffle(order)
            for name in order:
                if name == "gloo":
                    gloo.announce(num_bytes, BURST)
                for i in range(BURST):
                    start = time.perf_counter_ns()
                    trips[name](rows)
                    if i:
                        times[name].append((time.perf_counter_ns() - start) / 1000)
    medians = {name: round(statistics.median(values), 1) for name, values in times.items()}
    return {
        **{f"{name}_us": value for name, value in medians.items()},
        "ucx_us": min(medians["ucx_poll"], medians["ucx_sleep"]),
        "bytes": num_bytes, "trips": len(times["ours"]),
    }


def run(hosts: Hosts, all_rows: list[int], seconds: float) -> dict[str, Any]:
    """On host a. The servers are started on host b."""
    from expertwire import Client, Registry

    os.environ.update(
        EXPERTWIRE_TOKEN=secrets.token_hex(32), GLOO_SOCKET_IFNAME=hosts.device,
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    results = {}
    with contextlib.ExitStack() as stack:
        registry = stack.enter_context(Registry(f"{hosts.address('a')}:0"))
        # A file: namespaces share the file system, and a TCP store would ask for host names.
        store = str(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "store")
        children = {
            kind: stack.enter_context(echo_child(hosts, kind, argument))
            for kind, argument in (("ours", registry.address), ("gloo", store), ("grpc", ""))
        }
        gloo = GlooTrip(store)
        facts = {kind: child.wait_ready() for kind, child in children.items()}
        client = stack.enter_context(
            Client(registry, batch_invariant=False, hca="ucx", max_rows=MAX_ROWS,
                   num_slots=NUM_SLOTS)
        )
        client.wait_ready(20)
        trips: dict[str, Trip] = {
            "ours": our_trip(client), "gloo": gloo,
            "grpc": grpc_trip(f"{hosts.address('b')}:{facts['grpc'][0]}"),
        }
        raw = Perftest(hosts)
        for num_rows in all_rows:
            results[str(num_rows)] = measure(trips, gloo, raw, num_rows, seconds)
    pairs = {"gloo_over_ours": ("gloo", "ours"), "grpc_over_ours": ("grpc", "ours"),
             "ours_over_ucx": ("ours", "ucx")}
    return {
        "rows": results, "hidden_size": HIDDEN_SIZE, "dtype": "bfloat16", "cores": os.cpu_count(),
        "max_rows": MAX_ROWS, "num_slots": NUM_SLOTS,
        "network": "loopback" if hosts.one_host else "veth between two network namespaces",
        **{name: {rows: round(r[f"{a}_us"] / r[f"{b}_us"], 2) for rows, r in results.items()}
           for name, (a, b) in pairs.items()},
    }


def print_table(facts: dict[str, Any]) -> None:
    print(f"{'rows':>5} {'kB':>8}" + "".join(f"{name:>11}" for name in TABLE)
          + f"{'gloo/ours':>11}{'grpc/ours':>11}{'ours/ucx':>10}")
    for rows, r in facts["rows"].items():
        print(f"{rows:>5} {r['bytes'] / 1000:>8.1f}"
              + "".join(f"{r[name + '_us']:>11.1f}" for name in TABLE)
              + f"{facts['gloo_over_ours'][rows]:>11.2f}{facts['grpc_over_ours'][rows]:>11.2f}"
              f"{facts['ours_over_ucx'][rows]:>10.2f}")
    print(f"\n{facts['network']}, {facts['cores']} cores", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", default="1,8,32,128,512")
    parser.add_argument("--seconds", type=float, default=2.0, help="per number of rows")
    parser.add_argument("--json", action="store_true", help="the JSON line alone")
    parser.add_argument("--one-host", action="store_true", help="over the loopback device, no root")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--inside", metavar="PID", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        end_with_parent()
        torch.set_num_threads(1)
        SERVERS[options.serve[0]](*options.serve[1:])
        return
    hosts = Hosts(options.one_host)
    if not options.one_host and not options.inside:  # measure on host a
        with hosts.up():
            raise SystemExit(subprocess.run(
                hosts.command("a", sys.executable, *sys.argv, "--inside", str(os.getpid()))
            ).returncode)
    if options.inside:
        hosts._name = f"ew-trip-{options.inside}"
    facts = run(hosts, [int(r) for r in options.rows.split(",")], options.seconds)
    if not options.json:
        print_table(facts)
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
