"""What an idle server costs, and whether anybody starves with more processes than cores.

    python bench/sharing.py [--seconds 10] [--clients 4] [--servers 4] [--json]

idle: one echo server in its own process with clients connected that say nothing; its processor
time as a share of one core. crowd: all clients send batches to all servers as fast as they can for
some seconds, each in its own process; fairness is the slowest client's number of trips over the
fastest's, and the longest single trip says how long anybody was kept waiting.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

HIDDEN_SIZE, NUM_EXPERTS, TOP_K = 1024, 32, 4


def run_server(registry: str, experts: str) -> None:
    from expertwire import Server
    from expertwire.server.echo import EchoShard, echo_model

    shard = EchoShard(NUM_EXPERTS)
    shard.experts = json.loads(experts)
    model = echo_model(HIDDEN_SIZE, "bfloat16", num_experts=NUM_EXPERTS, top_k=TOP_K)
    with Server(shard, model, registry) as server:
        server.wait_registered(30)
        print("ready", flush=True)
        sys.stdin.read()


def run_client(registry: str, seconds: str) -> None:
    import torch

    from expertwire import Client

    torch.set_num_threads(1)
    with Client(registry, batch_invariant=False) as client:
        client.wait_ready(60)
        print("ready", flush=True)
        sys.stdin.readline()
        hidden = torch.randn(8, HIDDEN_SIZE).to(torch.bfloat16)
        ids = torch.stack([torch.randperm(NUM_EXPERTS)[:TOP_K] for _ in range(8)])
        weights = torch.full((8, TOP_K), 1 / TOP_K)
        trips, longest = 0, 0.0
        end = time.monotonic() + float(seconds)
        while time.monotonic() < end:
            start = time.monotonic()
            client.moe(0, hidden, ids, weights)
            longest = max(longest, time.monotonic() - start)
            trips += 1
        print(json.dumps({"trips": trips, "longest_ms": round(longest * 1000, 1)}), flush=True)
        sys.stdin.read()


ROLES = {"server": run_server, "client": run_client}


class Role:
    """One of the roles above in a process of its own; it leaves when its input closes."""

    def __init__(self, kind: str, *arguments: str):
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--role", kind, *arguments], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        if not text:
            raise SystemExit(f"a process ended with code {self.process.wait()}")
        return text

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> Role:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def idle_share(registry: str, num_clients: int, seconds: float) -> float:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Role("server", registry, json.dumps(list(range(NUM_EXPERTS)))))
        server.line()
        for _ in range(num_clients):
            stack.enter_context(Role("client", registry, "0")).line()
        time.sleep(1)
        before = server.cpu_seconds()
        time.sleep(seconds)
        return (server.cpu_seconds() - before) / seconds


def crowd(registry: str, num_servers: int, num_clients: int, seconds: float) -> dict:
    with contextlib.ExitStack() as stack:
        shares = [list(range(i, NUM_EXPERTS, num_servers)) for i in range(num_servers)]
        servers = [stack.enter_context(Role("server", registry, json.dumps(s))) for s in shares]
        for server in servers:
            server.line()
        clients = [
            stack.enter_context(Role("client", registry, str(seconds))) for _ in range(num_clients)
        ]
        for client in clients:
            client.line()
        for client in clients:
            client.go()
        results = [json.loads(client.line()) for client in clients]
    trips = [r["trips"] for r in results]
    return {
        "servers": num_servers, "clients": num_clients, "trips_per_s": sum(trips) / seconds,
        "fairness": round(min(trips) / max(trips), 3),
        "longest_trip_ms": max(r["longest_ms"] for r in results),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each measurement")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--json", action="store_true", help="only the JSON line, no tables")
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        ROLES[options.role[0]](*options.role[1:])
        return
    from expertwire import Registry

    os.environ["EXPERTWIRE_TOKEN"] = secrets.token_hex(32)
    facts: dict = {"cores": os.cpu_count(), "idle_share": {}}
    with Registry("127.0.0.1:0", token=os.environ["EXPERTWIRE_TOKEN"].encode()) as registry:
        for num_clients in (0, 1, 8):
            share = idle_share(registry.address, num_clients, options.seconds)
            facts["idle_share"][str(num_clients)] = round(share, 4)
        facts["crowd"] = crowd(
            registry.address, options.servers, options.clients, options.seconds
        )
    if not options.json:
        print("idle server, share of one core")
        for num_clients, share in facts["idle_share"].items():
            print(f"{num_clients:>4} clients {share:>8.2%}")
        c = facts["crowd"]
        print(f"\n{c['clients']} clients and {c['servers']} servers on {facts['cores']} cores\n"
              f"{c['trips_per_s']:>8.0f} trips/s, slowest client / fastest {c['fairness']:.2f}, "
              f"longest trip {c['longest_trip_ms']:.1f} ms\n")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
