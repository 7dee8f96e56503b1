"""Many servers and many clients on one host: come up, serve, go, leave nothing.

    python bench/many.py --servers 64 --clients 64 --json

Every client is connected to every server, and checks each of its results. --per-process of them
share a process (1: each has its own). Processes are forked from one that has imported everything:
starting 128 interpreters would measure the disk. It must all be over within --limit seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import resource
import signal
import threading
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from expertwire import Client, Registry, Server
from expertwire.model.reference import moe_reference
from expertwire.registry.question import ask
from expertwire.server.echo import echo_model

TOKEN = b"many-servers-token-0123456789"
HIDDEN, TOP_K, ROWS = 64, 4, 8


class ScaledExperts:
    """Expert e multiplies by e + 1: cheap, and tells experts apart."""

    echo = False
    min_rows = 1

    def __init__(self, experts: list[int]):
        self.experts = experts

    def run(self, layer, rows, offsets, batch_invariant):
        out = torch.empty_like(rows)
        for i, expert in enumerate(self.experts):
            out[offsets[i] : offsets[i + 1]] = rows[offsets[i] : offsets[i + 1]] * (expert + 1)
        return out


def serve(address: str, ids: range, num_servers: int, model: dict) -> None:
    """Expert i is on server i and on the one before it."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with contextlib.ExitStack() as stack:
        for i in ids:
            experts = sorted({i, (i + 1) % num_servers})
            stack.enter_context(
                Server(ScaledExperts(experts), model, address, token=TOKEN, name=f"s{i}")
            )
        stop.wait()


def memory_kb(pids: list[int]) -> int:
    """What the processes keep in memory, shared pages counted once (proc(5), smaps_rollup)."""
    lines = [line for pid in pids
             for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def use_many(address: str, ids: range, *rest) -> None:
    threads = [threading.Thread(target=use, args=(address, i, *rest)) for i in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def use(
    address: str, idx: int, num_servers: int, steps: int, limit: float, report: int, go: int
) -> None:
    """One client: connects, says so, waits for its turn, sends, checks, reports."""
    generator = torch.Generator().manual_seed(idx)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator)
    settings = {"max_rows": ROWS, "connect_timeout": limit}
    with Client(address, token=TOKEN, name=f"c{idx}", **settings) as client:
        table = client.links.wait(lambda t: len(t.links) == num_servers, limit)
        told = {"connected": len(table.links)}
        os.write(report, json.dumps(told).encode() + b"\n")
        os.read(go, 1)
        wrong, slowest = 0, 0.0
        for _ in range(steps):
            ids = torch.randint(0, num_servers, (ROWS, TOP_K), generator=generator)
            weights = torch.rand(ROWS, TOP_K, generator=generator)
            start = time.monotonic()
            out = client.moe(0, hidden, ids, weights)
            slowest = max(slowest, time.monotonic() - start)
            want = moe_reference(
                hidden, ids, weights, lambda e, rows: rows * (e + 1), num_servers
            )
            wrong += not torch.allclose(out, want, rtol=1e-5, atol=1e-4)
        line = {"wrong": wrong, "slowest_ms": slowest * 1e3, "retries": client.num_retries}
        os.write(report, json.dumps(line).encode() + b"\n")


PIDS: list[int] = []
PR_SET_PDEATHSIG = 1  # prctl(2)


def shares(count: int, size: int) -> list[range]:
    return [range(i, min(i + size, count)) for i in range(0, count, size)]


def fork(work) -> int:
    pid = os.fork()
    PIDS.append(pid)
    if pid == 0:
        code = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # never left behind
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def read_lines(fd: int, count: int, deadline: float) -> list[dict]:
    """That many lines, each of one client (short writes to a pipe come whole)."""
    lines, rest = [], b""
    os.set_blocking(fd, False)
    while len(lines) < count:
        if time.monotonic() > deadline:
            raise SystemExit(f"only {len(lines)} of {count} clients came so far")
        try:
            rest += os.read(fd, 65536)
        except BlockingIOError:
            time.sleep(0.01)
            continue
        *whole, rest = rest.split(b"\n")
        lines += [json.loads(line) for line in whole]
    return lines


def reap(pids: list[int], deadline: float) -> int:
    """How many did not end, or ended with an error."""
    bad, left = 0, set(pids)
    while left and time.monotonic() < deadline:
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                left.discard(pid)
                PIDS.remove(pid)
                bad += status != 0
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        PIDS.remove(pid)
    return bad + len(left)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=64)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20, help="batches per client")
    parser.add_argument("--per-process", type=int, default=8)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds, for everything")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 16384)), hard))
    torch.set_num_threads(1)
    model = echo_model(HIDDEN, "float32", num_experts=args.servers, top_k=TOP_K)
    model["name"] = "scaled"
    deadline = time.monotonic() + args.limit
    report, report_write = os.pipe()
    go_read, go = os.pipe()
    registry_pipe, registry_write = os.pipe()

    def run_registry() -> None:
        registry = Registry(token=TOKEN)
        signal.signal(signal.SIGTERM, lambda *_: registry.close())
        registry.start()
        os.write(registry_write, registry.address.encode())
        registry.serve_forever()

    gc.freeze()  # what is imported by now is shared by all: no collection touches it
    start = time.monotonic()
    registry_pid = fork(run_registry)
    address = os.read(registry_pipe, 200).decode()
    servers = [
        fork(lambda ids=ids: serve(address, ids, args.servers, model))
        for ids in shares(args.servers, args.per_process)
    ]
    clients = [
        fork(lambda ids=ids: use_many(
            address, ids, args.servers, args.steps, args.limit, report_write, go_read))
        for ids in shares(args.clients, args.per_process)
    ]
    connected = read_lines(report, args.clients, deadline)
    up = time.monotonic()
    memory = memory_kb(PIDS)
    status = ask(address, TOKEN, {"type": "status"})
    sockets = {"@" + s["address"] for s in status["servers"]}
    os.write(go, b"x" * args.clients)
    results = read_lines(report, args.clients, deadline)
    served = time.monotonic()
    bad_clients = reap(clients, deadline)
    for pid in servers:
        os.kill(pid, signal.SIGTERM)
    bad_servers = reap(servers, deadline)
    os.kill(registry_pid, signal.SIGTERM)
    bad_registry = reap([registry_pid], deadline)
    gone = time.monotonic()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    left = [line for line in Path("/proc/net/unix").read_text().splitlines()
            if line.split()[-1] in sockets]
    steps = args.clients * args.steps
    facts = {
        "servers": args.servers, "clients": args.clients,
        "processes": len(servers) + len(clients) + 1,
        "members": len(sockets), "connections": sum(c["connected"] for c in connected),
        "up_s": round(up - start, 2), "memory_mb": memory // 1024, "steps": steps,
        "steps_per_s": round(steps / (served - up), 1),
        "slowest_ms": round(max(r["slowest_ms"] for r in results), 1),
        "wrong": sum(r["wrong"] for r in results), "retries": sum(r["retries"] for r in results),
        "gone_s": round(gone - served, 2), "all_s": round(gone - start, 2),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "bad_exits": bad_clients + bad_servers + bad_registry, "sockets_left": len(left),
    }
    if args.json:
        print(json.dumps(facts))
    else:
        for name, value in facts.items():
            print(f"{name:14} {value}")


def end_all() -> None:
    """Whatever is still there after a failure."""
    for pid in PIDS:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    for pid in PIDS:
        with contextlib.suppress(OSError):
            os.waitpid(pid, 0)


if __name__ == "__main__":
    try:
        main()
    finally:
        end_all()
