"""The software HCA's rate: writes from 8 B to 4 MiB, beside UCX over shared memory and memcpy.

    python bench/hca_rate.py [--sizes 8,4096,1048576] [--seconds 0.3] [--json]

    latency   half a round trip of writes of one size between two processes: each waits for the
              last word of the other's write, then answers. Median over launches of 50 round trips.
              Beside it `ucx_perftest -t ucp_put_lat`, its median. Both need two idle cores.
    rate      writes one behind the other into the memory of a peer, one quiet at the end of each
              batch; posted by device code on one and on eight queue pairs, executed by the engine
              on the same thread. Beside it `ucx_perftest -t ucp_put_bw` and memcpy.

All in the same run; one and eight queue pairs and memcpy in turns, the rest one after another for
each size. UCX_TLS is posix,self; ucx_perftest comes with
the libucx wheel (`pip install libucx-cu12` or `-cu13`), and without it that column stays empty.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from expertwire.control.connection import Endpoint
from expertwire.control.handles import ConnectionHandle, MemoryHandle
from expertwire.device_structs import IbgdaOperation, IbgdaRunArgs, KernelStatus
from expertwire.hca.soft import SoftHca
from expertwire.launch import Launch, hca_array

SIZES = [8, 64, 512, 4096, 32768, 262144, 1 << 20, 4 << 20]
PUT, INLINE, QUIET, FILL, AWAIT = 1, 2, 6, 8, 9  # device_checks.cuh IbgdaOp
ROUNDS = 50  # of a ping-pong launch
HELLO = 64  # bytes behind the payload: both sides are running
TIMEOUT_NS = 20 * 10**9


class Program:
    """A list of queue-pair operations that device code runs in one launch."""

    def __init__(self, end: Endpoint, operations: list[dict]):
        self._table = (IbgdaOperation * len(operations))(
            *[IbgdaOperation(**operation) for operation in operations])
        self._status = KernelStatus()
        self._launch = Launch([("ibgda_run", IbgdaRunArgs(
            peer=end.peer_addr, operations=ctypes.addressof(self._table),
            status=ctypes.addressof(self._status), num_operations=len(operations),
        ))])
        self._hcas = hca_array(end.hca.pointer)

    def run(self) -> float:
        """Seconds that it took."""
        start = time.perf_counter()
        self._launch.run(self._hcas)
        seconds = time.perf_counter() - start
        if self._status.code:
            raise SystemExit(f"a queue-pair operation failed: code {self._status.code}, "
                             f"stage {self._status.stage}, syndrome {self._status.syndrome:#x}")
        return seconds


# ------------------------------------------------------------------ latency


def ping_pong(end: Endpoint, size: int, first: bool) -> Program:
    """ROUNDS round trips; each side's n-th write ends with the word n."""
    assert end.remote is not None
    here, there = end.recv.addr + size - 8, end.remote.addr
    operations = []
    for turn in range(1, ROUNDS + 1):
        wait = [dict(op=AWAIT, local_addr=here, value=turn)]
        if size == 8:
            send = [dict(op=INLINE, remote_addr=there, num_bytes=8, value=turn)]
        else:
            send = [dict(op=FILL, local_addr=end.send.addr + size - 8, num_bytes=8, value=turn),
                    dict(op=PUT, remote_addr=there, local_addr=end.send.addr, num_bytes=size)]
        operations += send + wait if first else wait + send
    # Nobody drives this engine after the launch, and a large write goes in pieces.
    return Program(end, [*operations, dict(op=QUIET)])


def say_hello(end: Endpoint, size: int) -> Program:
    """Ends when the other side runs too, so that its start is not part of what is timed."""
    assert end.remote is not None
    return Program(end, [
        dict(op=INLINE, remote_addr=end.remote.addr + size, num_bytes=8, value=1),
        dict(op=AWAIT, local_addr=end.recv.addr + size, value=1),
    ])


def exchange(link: socket.socket, end: Endpoint) -> None:
    own = end.connection_handle().pack(), end.memory_handle().pack()
    socket.send_fds(link, [json.dumps([raw.hex() for raw in own]).encode()], end.fds())
    message, fds, _, _ = socket.recv_fds(link, 65536, 3)
    connection, memory = (bytes.fromhex(text) for text in json.loads(message))
    end.connect(ConnectionHandle.unpack(connection), MemoryHandle.unpack(memory), fds)


def play(link: socket.socket, size: int, seconds: float, first: bool) -> tuple[float, float]:
    """Seconds of half a round trip: median and fastest of the launches.

    Both processes run the same number of launches.
    """
    with SoftHca(thread=False) as hca:
        end = Endpoint(hca, send_bytes=size, recv_bytes=size + HELLO, timeout_ns=TIMEOUT_NS)
        exchange(link, end)
        program, hello = ping_pong(end, size, first), say_hello(end, size)
        taken: list[float] = []
        last = time.perf_counter() + 2 * seconds
        while True:
            ctypes.memset(end.recv.addr + size - 8, 0, 16)
            # Both have their words cleared before either writes; the first side says when to stop.
            stop = first and len(taken) >= 3 and time.perf_counter() > last
            link.sendall(b"x" if stop else b".")
            if link.recv(1) == b"x" or stop:
                break
            hello.run()
            taken.append(program.run())
        end.close()
        return statistics.median(taken[1:]) / ROUNDS / 2, min(taken) / ROUNDS / 2


def latency(size: int, seconds: float) -> tuple[float, float]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, __file__, "--play", str(theirs.fileno()), str(size)]
        child = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        try:
            return play(ours, size, seconds, True)
        finally:
            child.wait(30)


# ------------------------------------------------------------------ rate


class Loop:
    """A pair of HCAs in this process, for writes one behind the other."""

    def __init__(self, size: int, num_qps: int):
        self.here, self.there = SoftHca(thread=False), SoftHca(thread=False)
        options = dict(num_qps=num_qps, depth=1024, timeout_ns=TIMEOUT_NS)
        self.sender = Endpoint(self.here, send_bytes=size, recv_bytes=8, **options)
        self.target = Endpoint(self.there, send_bytes=8, recv_bytes=size, **options)
        for end, other in ((self.sender, self.target), (self.target, self.sender)):
            end.connect(other.connection_handle(), other.memory_handle(),
                        [os.dup(fd) for fd in other.fds()])
        ctypes.memset(self.sender.send.addr, 0x5A, size)
        self.count = max(num_qps, min(2048, (64 << 20) // size))
        put = dict(op=PUT, remote_addr=self.target.recv.addr, local_addr=self.sender.send.addr,
                   num_bytes=size)
        self.program = Program(self.sender, [
            *[dict(put, qp_id=i % num_qps) for i in range(self.count)],
            *[dict(op=QUIET, qp_id=q) for q in range(num_qps)],
        ])

    def close(self) -> None:
        self.sender.close()
        self.target.close()
        self.here.close()
        self.there.close()


def rates(size: int, seconds: float) -> dict[str, float]:
    """Median seconds per write on one and on eight queue pairs, and per memcpy between the same
    kinds of memory (the interpreter's call included). In turns: all see the same machine."""
    loops = {"qp1": Loop(size, 1), "qp8": Loop(size, 8)}
    one, move = loops["qp1"], ctypes.memmove
    source, target = one.sender.send.addr, one.sender.mapped_addr

    def copy() -> float:
        start = time.perf_counter()
        for _ in range(one.count):
            move(target, source, size)
        return (time.perf_counter() - start) / one.count

    runs = {name: lambda loop=loop: loop.program.run() / loop.count for name, loop in loops.items()}
    runs["memcpy"] = copy
    taken: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + 3 * seconds
    while time.perf_counter() < end or len(taken["qp1"]) < 3:
        for name, run in runs.items():
            taken[name].append(run())
    for loop in loops.values():
        loop.close()
    return {name: statistics.median(values[1:]) for name, values in taken.items()}


# ------------------------------------------------------------------ UCX


def find_ucx() -> Path | None:
    spec = importlib.util.find_spec("libucx")
    if spec is None or spec.origin is None:
        return None
    return next(iter(Path(spec.origin).parent.glob("bin/ucx_perftest")), None)


def ucx(program: Path, test: str, size: int, seconds: float) -> float:
    """Seconds per write of a ucx_perftest between two processes: the median that it prints."""
    environment = {**os.environ, "UCX_TLS": "posix,self", "UCX_LOG_LEVEL": "error",
                   "LD_LIBRARY_PATH": str(program.parents[1] / "lib")}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    # A byte costs at least 0.05 ns: no more iterations than there is time for.
    count = str(max(50, int(seconds / (3e-7 + size * 5e-11) / 2)))
    server = subprocess.Popen([str(program), "-p", port], env=environment,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(50):
            client = subprocess.run(
                [str(program), "127.0.0.1", "-p", port, "-t", test, "-s", str(size), "-n", count,
                 "-w", "50", "-f", "-v"], env=environment, capture_output=True, text=True,
                timeout=60, check=False,
            )
            if row := re.findall(r"(?m)^ *\d+,([\d.]+),([\d.]+),", client.stdout):
                # Bandwidth is what the whole run gave; latency the median, as ours.
                return float(row[-1][0 if test.endswith("lat") else 1]) * 1e-6
            time.sleep(0.1)  # the server does not listen yet
        raise SystemExit(f"ucx_perftest {test} gave nothing: {client.stderr[-300:]}")
    finally:
        server.kill()
        server.wait()


# ------------------------------------------------------------------ the run


def measure(sizes: list[int], seconds: float) -> Iterator[dict]:
    program = find_ucx()
    for size in sizes:
        median, fastest = latency(size, seconds)
        row = {"bytes": size, "latency_us": median * 1e6, "fastest_latency_us": fastest * 1e6}
        times = rates(size, seconds)
        if program:
            row["ucx_latency_us"] = ucx(program, "ucp_put_lat", size, seconds) * 1e6
            times["ucx"] = ucx(program, "ucp_put_bw", size, seconds)
        for name, value in times.items():
            row[f"{name}_writes_per_s"], row[f"{name}_gb_per_s"] = 1 / value, size / value / 1e9
        yield row


def show(measured: Iterator[dict]) -> None:
    print(f"{'bytes':>9} | {'latency us':>10} {'ucx':>7} | {'1 qp, writes/s':>14} {'8 qps':>9} "
          f"{'ucx':>9} | {'1 qp, GB/s':>10} {'8 qps':>6} {'ucx':>6} {'memcpy':>6}", flush=True)
    rows = []
    for row in measured:
        rows.append(row)
        theirs = (row.get(f"ucx_{name}", float("nan"))
                  for name in ("latency_us", "writes_per_s", "gb_per_s"))
        lat, writes, gb = theirs
        print(f"{row['bytes']:>9} | {row['latency_us']:>10.2f} {lat:>7.2f} | "
              f"{row['qp1_writes_per_s']:>14.0f} {row['qp8_writes_per_s']:>9.0f} {writes:>9.0f} | "
              f"{row['qp1_gb_per_s']:>10.2f} {row['qp8_gb_per_s']:>6.2f} {gb:>6.2f} "
              f"{row['memcpy_gb_per_s']:>6.2f}", flush=True)
    small, large = rows[0], next((r for r in rows if r["bytes"] == 1 << 20), None)
    if "ucx_latency_us" in small:
        times = small["latency_us"] / small["ucx_latency_us"]
        fastest = small["fastest_latency_us"] / small["ucx_latency_us"]
        print(f"latency at {small['bytes']} B: {times:.2f} x UCX posix, the fastest launch "
              f"{fastest:.2f} x (aim: 3)")
    if large:
        one, eight = (large[f"{n}_gb_per_s"] / large["memcpy_gb_per_s"] for n in ("qp1", "qp8"))
        print(f"bandwidth at 1 MiB: {one:.2f} x memcpy on one queue pair, {eight:.2f} x on eight "
              "(aim: 0.8)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--seconds", type=float, default=0.3, help="per size and competitor")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--play", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        fd, size = map(int, options.play)
        with socket.socket(fileno=fd) as link:
            play(link, size, 0, False)
        return
    sizes = [int(text) for text in options.sizes.split(",") if text.strip().isdigit()]
    if len(sizes) != len(options.sizes.split(",")) or any(size < 8 or size % 8 for size in sizes):
        parser.error("--sizes: multiples of 8, at least 8, with commas between them")
    if not options.seconds > 0:
        parser.error("--seconds must be more than 0")
    rows = measure(sizes, options.seconds)
    print(json.dumps(list(rows))) if options.json else show(rows)


if __name__ == "__main__":
    main()
