"""Two processes with an HCA kernel and one end of a connection each, one of them at hand.

The other process does what it is told over a socket. kind: "cpu" (the kernel on the CPU target, in
a thread of each process) or "gpu" (on the first and the last GPU).
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import socket
import sys
import threading
import time
from typing import Any

from expertwire.control.connection import Endpoint
from expertwire.control.handles import ConnectionHandle, MemoryHandle
from expertwire.device_structs import IbgdaOperation, IbgdaRunArgs, KernelStatus

SIZE = 1 << 20
SECONDS = 120.0  # of one request to the other process, its start and compilers included
TIMEOUT_NS = 20_000_000_000


class CpuSide:
    """Memory that both processes map; device code here, the HCA kernel in a thread beside it."""

    def __init__(self, _index: int):
        from expertwire.hca.kernel import KernelHca
        from expertwire.target import CpuTarget

        self.target = CpuTarget(2)
        self._make = lambda: KernelHca(CpuTarget(2), warps=2)

    def open(self, depth: int) -> None:
        self.hca = self._make()
        self.end = Endpoint(self.hca, send_bytes=SIZE, recv_bytes=SIZE, depth=depth,
                            timeout_ns=TIMEOUT_NS)
        self._stop = threading.Event()
        self._engine = threading.Thread(target=self._run, daemon=True)
        self._engine.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self.hca.poll():
                time.sleep(0.0002)

    def quiesce(self) -> None:
        self._stop.set()
        self._engine.join(10)

    def read(self, region: str, offset: int, num_bytes: int) -> bytes:
        return ctypes.string_at(getattr(self.end, region).addr + offset, num_bytes)

    def write(self, region: str, offset: int, data: bytes) -> None:
        ctypes.memmove(getattr(self.end, region).addr + offset, data, len(data))


class GpuSide:
    """Memory of one GPU that the other process maps; index: 0 the first GPU, 1 the last."""

    def __init__(self, index: int):
        import torch

        from expertwire.target import GpuTarget

        device = 0 if index == 0 else torch.cuda.device_count() - 1
        torch.cuda.set_device(device)
        self.target = GpuTarget(device)

    def open(self, depth: int) -> None:
        from expertwire.cuda.endpoint import GpuEndpoint
        from expertwire.cuda.hca import GpuHca

        self.hca: Any = GpuHca(self.target.device.index)
        self.end = GpuEndpoint(self.hca, send_bytes=SIZE, recv_bytes=SIZE, depth=depth,
                               timeout_ns=TIMEOUT_NS)

    def quiesce(self) -> None:
        self.target.synchronize()

    def read(self, region: str, offset: int, num_bytes: int) -> bytes:
        return self.hca.words.read(getattr(self.end, region).addr + offset, num_bytes)

    def write(self, region: str, offset: int, data: bytes) -> None:
        self.hca.words.write(getattr(self.end, region).addr + offset, data)


class Side:
    """What either process can be asked; all arguments and results can be pickled."""

    def __init__(self, kind: str, index: int, channel: socket.socket):
        self._channel = channel
        self._side = {"cpu": CpuSide, "gpu": GpuSide}[kind](index)

    def open(self, depth: int) -> None:
        """Makes an end and connects it to what the other process makes at the same time."""
        side = self._side
        side.open(depth)
        offer = side.end.connection_handle().pack(), side.end.memory_handle().pack()
        socket.send_fds(self._channel, [pickle.dumps(offer)], side.end.fds())
        raw, fds, *_ = socket.recv_fds(self._channel, 4096, 3)
        connection, memory = pickle.loads(raw)
        self.remote = MemoryHandle.unpack(memory)
        side.end.connect(ConnectionHandle.unpack(connection), self.remote, fds)

    def read(self, region: str, offset: int, num_bytes: int) -> bytes:
        return self._side.read(region, offset, num_bytes)

    def write(self, region: str, offset: int, data: bytes) -> None:
        self._side.write(region, offset, data)

    def run(self, *per_warp: list[dict]) -> list[tuple[int, int, int]]:
        """Operations per warp, all lists of one length; (code, syndrome, entry) of each warp.

        remote, local: offsets in the other's `recv` and in our `send`; own: in our `recv`, instead.
        """
        target, end = self._side.target, self._side.end
        flat = [self._operation(**o) for operations in per_warp for o in operations]
        table = target.place((IbgdaOperation * len(flat))(*flat))
        status = target.alloc(len(per_warp) * ctypes.sizeof(KernelStatus))
        args = IbgdaRunArgs(peer=end.peer_addr, operations=table.addr, status=status.addr,
                            num_operations=len(per_warp[0]))
        target.prepare([("ibgda_run", args)], warps=len(per_warp)).run()
        found = [status.read_struct(KernelStatus, i) for i in range(len(per_warp))]
        return [(entry.code, entry.syndrome, entry.wqe_idx) for entry in found]

    def _operation(self, *, remote: int = 0, local: int = 0, own: int | None = None,
                   source: int | None = None, **fields: int) -> IbgdaOperation:
        end = self._side.end
        to = end.send.addr + local if own is None else end.recv.addr + own
        at = self.remote.addr + remote if source is None else end.recv.addr + source
        return IbgdaOperation(remote_addr=at, local_addr=to, **fields)

    def revoke(self) -> None:
        """The other process's key for our memory is taken back."""
        self._side.end._window.revoke(self._side.end._rkey)

    def publish(self) -> None:
        end = self._side.end
        end._rkey = end._window.publish(end._recv_mr)

    def peer_lost(self) -> None:
        self._side.end.peer_lost()

    def first_error(self) -> tuple[int, int]:
        return self._side.end.first_error()

    def stats(self) -> dict[str, int]:
        return self._side.hca.stats()

    def close(self) -> None:
        self._side.quiesce()
        self._side.end.close()
        self._side.hca.close()


def _tell(channel: socket.socket, what: Any) -> None:
    raw = pickle.dumps(what)
    channel.sendall(len(raw).to_bytes(4, "little") + raw)


def _hear(channel: socket.socket) -> Any:
    """Raises EOFError when the other side is gone."""

    def exactly(count: int) -> bytes:
        raw = b""
        while len(raw) < count:
            part = channel.recv(count - len(raw))
            if not part:
                raise EOFError("the other process is gone")
            raw += part
        return raw

    return pickle.loads(exactly(int.from_bytes(exactly(4), "little")))


def _serve(kind: str, channel: socket.socket, links: socket.socket) -> None:
    """The other process: one request after another, until the channel ends."""
    side = Side(kind, 1, links)
    while True:
        try:
            name, args = _hear(channel)
        except EOFError:
            return
        try:
            answer: Any = getattr(side, name)(*args)
        except BaseException as err:
            answer = RuntimeError(f"the other process, {name}: {type(err).__name__}: {err}")
        _tell(channel, answer)


class Other:
    """The other process's side: its methods by name, in one go or begun and finished later."""

    def __init__(self, kind: str, links: socket.socket):
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(SECONDS)
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=_serve, args=(kind, theirs, links), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, name: str, *args: Any) -> None:
        _tell(self._channel, (name, args))

    def finish(self) -> Any:
        """The answer to what was begun."""
        answer = _hear(self._channel)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def ask(self, name: str, *args: Any) -> Any:
        self.begin(name, *args)
        return self.finish()

    def end(self) -> None:
        self._channel.close()
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


class Processes:
    """This process and the other one; `pair` connects them anew."""

    def __init__(self, kind: str):
        start = time.monotonic()
        links, theirs = socket.socketpair()
        links.settimeout(SECONDS)
        self.there = Other(kind, theirs)
        self.here = Side(kind, 0, links)
        theirs.close()
        self._open = False
        self.connect(16)
        self.disconnect()
        print(f"two ends ({kind}): {time.monotonic() - start:.1f} s until the first connection",
              file=sys.stderr)

    def connect(self, depth: int = 64) -> None:
        self.there.begin("open", depth)
        self.here.open(depth)
        self.there.finish()
        self._open = True

    def disconnect(self) -> None:
        """The other side's end is closed as well, if its process still runs."""
        if self._open:
            self._open = False
            if self.there.process.is_alive():
                self.there.ask("close")
            self.here.close()

    def kill_other(self) -> None:
        os.kill(self.there.process.pid, 9)
        self.there.process.join(20)

    def end(self) -> None:
        self.disconnect()
        self.there.end()
