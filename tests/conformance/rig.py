"""Two software HCAs in one process, and every byte between them in the test's hands.

`Rig` posts work-queue entries by hand: ring, doorbell record and register are written with ctypes,
the engine runs only when the test says so. `DeviceRig` hands the same queue to the device code.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import replace

from expertwire.control.connection import configured_doorbell
from expertwire.device_structs import (
    IbgdaKey,
    IbgdaOperation,
    IbgdaPeer,
    IbgdaQp,
    IbgdaRunArgs,
    KernelStatus,
)
from expertwire.hca.soft import CQ_COLLAPSED, CQ_OVERRUN_IGNORE, SoftHca
from expertwire.hca.wqe import Cqe, DataSegment, Wqe, doorbell_record, doorbell_register
from expertwire.launch import Launch, hca_array

NOP, WRITE, WRITE_IMM, READ = 0x00, 0x08, 0x09, 0x10
ATOMIC_CS, ATOMIC_FA, MASKED_CS, MASKED_FA, DUMP = 0x11, 0x12, 0x14, 0x15, 0x23
ALL_ACCESS = 15
COLLAPSED = CQ_COLLAPSED | CQ_OVERRUN_IGNORE
INVALID_LKEY = 0x100

LOCAL_LENGTH, LOCAL_QP_OPERATION, LOCAL_PROTECTION, FLUSHED = 0x01, 0x02, 0x04, 0x05
REMOTE_INVALID_REQUEST, REMOTE_ACCESS, PEER_LOST, NO_RECEIVE = 0x12, 0x13, 0x15, 0x16


class Rig:
    """Initiator `here` and target `there`, one region each, and a connected queue pair.

    depth: blocks of the send queue; num_bytes: size of both regions.
    """

    def __init__(
        self, depth: int = 64, *, num_cqe: int | None = None, cq_flags: int = COLLAPSED,
        num_bytes: int = 1 << 16, local_access: int = ALL_ACCESS, remote_access: int = ALL_ACCESS,
        thread: bool = False,
    ):
        self.here = SoftHca(thread=thread)
        # Behind a network the target's engine executes what comes, by itself.
        self.there = SoftHca(thread=self.here.network)
        self.local, self.remote = self.here.alloc(num_bytes), self.there.alloc(num_bytes)
        self.local_mr = self.here.register(self.local.addr, num_bytes, local_access)
        self.remote_mr = self.there.register(self.remote.addr, num_bytes, remote_access)
        self.lkey = self.local_mr.lkey
        self.window = self.there.create_window()
        self.rkey = self.window.publish(self.remote_mr, 0)
        self.back, self.back_peer = None, None
        if self.here.network:
            self.back = self.here.create_window()
            self.back_peer = self.there.connect_peer(self.window, self.back.wire)
            self.peer = self.here.connect_peer(self.back, self.window.wire)
        else:
            self.peer = self.here.import_peer(self.window.fd, self.there.wake_fd, [self.remote.fd])
        self.qps = []
        self.qp = self.add_qp(depth, num_cqe=num_cqe, cq_flags=cq_flags)
        self.next_idx = 0

    def add_qp(self, depth: int = 64, *, connect: bool = True, **options):
        qp = self.here.create_qp(depth, **options)
        self.qps.append(qp)
        if connect:
            qp.connect(self.peer, 0x77)
        return qp

    def start_at(self, index: int) -> None:
        """The main queue pair, not used yet, goes on from this index."""
        self.qp.start_at(index)
        self.next_idx = index

    def close(self) -> None:
        for qp in self.qps:
            qp.destroy()
        self.peer.close()
        if self.back_peer is not None:
            self.back_peer.close()
            self.back.close()
        self.window.close()
        self.here.close()
        self.there.close()
        self.local.close()
        self.remote.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- memory ---------------------------------------------------------------------------
    def fill(self, offset: int, raw: bytes) -> None:
        """Puts bytes into the local region."""
        ctypes.memmove(self.local.addr + offset, raw, len(raw))

    def fill_remote(self, offset: int, raw: bytes) -> None:
        ctypes.memmove(self.remote.addr + offset, raw, len(raw))

    def at_local(self, offset: int, num_bytes: int) -> bytes:
        return ctypes.string_at(self.local.addr + offset, num_bytes)

    def at_remote(self, offset: int, num_bytes: int) -> bytes:
        return ctypes.string_at(self.remote.addr + offset, num_bytes)

    def segment(self, offset: int, num_bytes: int, lkey: int | None = None) -> DataSegment:
        return DataSegment(num_bytes, self.lkey if lkey is None else lkey, self.local.addr + offset)

    # --- entries --------------------------------------------------------------------------
    def wqe(self, opcode: int = WRITE, **fields) -> Wqe:
        """An entry of the main queue pair with the next index; fields as in hca.wqe.Wqe."""
        defaults = dict(index=self.next_idx, qpn=self.qp.info.qpn)
        return Wqe(opcode, **{**defaults, **fields})

    def write(
        self, remote_offset: int = 0, local_offset: int = 0, num_bytes: int = 8, **fields
    ) -> Wqe:
        defaults = dict(
            raddr=self.remote.addr + remote_offset, rkey=self.rkey,
            data=(self.segment(local_offset, num_bytes),),
        )
        opcode = fields.pop("opcode", WRITE)
        return self.wqe(opcode, **{**defaults, **fields})

    def inline(self, remote_offset: int, raw: bytes, **fields) -> Wqe:
        return self.write(remote_offset, data=(), inline=raw, **fields)

    def atomic(
        self, opcode: int, operands: bytes, remote_offset: int = 0, sink_offset: int = 0,
        sink_bytes: int = 8, **fields,
    ) -> Wqe:
        return self.write(
            remote_offset, sink_offset, sink_bytes, opcode=opcode, atomic=operands, **fields
        )

    # --- posting by hand ------------------------------------------------------------------
    def place(self, wqe: Wqe | bytes, idx: int | None = None, qp=None) -> int:
        """Writes the entry into the ring from block `idx` on; returns the number of blocks."""
        info = (qp or self.qp).info
        raw = wqe if isinstance(wqe, bytes) else wqe.encode()
        idx = self.next_idx if idx is None else idx
        num_blocks = max(1, -(-len(raw) // 64))
        for block in range(num_blocks):
            slot = (idx + block) & (info.num_wqe - 1)
            part = raw[64 * block : 64 * (block + 1)]
            ctypes.memmove(info.sq_addr + 64 * slot, part, len(part))
        return num_blocks

    def set_record(self, next_idx: int, qp=None) -> None:
        """Word 1 of the doorbell record; word 0 belongs to the receive queue."""
        addr = (qp or self.qp).info.dbrec_addr
        ctypes.memmove(addr + 4, doorbell_record(next_idx)[4:], 4)

    def set_register(self, next_idx: int, qp=None, raw: bytes | None = None, at: int = 0x800):
        """One 8-byte store to the doorbell register (or `raw`, e.g. a whole entry)."""
        info = (qp or self.qp).info
        raw = doorbell_register(next_idx, info.qpn) if raw is None else raw
        if len(raw) == 8:
            ctypes.c_uint64.from_address(info.uar_addr + at).value = struct.unpack("<Q", raw)[0]
        else:
            ctypes.memmove(info.uar_addr + at, raw, len(raw))

    def ring(self, next_idx: int | None = None, qp=None) -> None:
        next_idx = self.next_idx if next_idx is None else next_idx
        self.set_record(next_idx, qp)
        self.set_register(next_idx, qp)

    def post(self, *wqes: Wqe, ring: bool = True) -> int:
        """Places entries behind each other, with running indices, then rings once.

        Returns the index of the first block.
        """
        first = self.next_idx
        for wqe in wqes:
            self.next_idx += self.place(replace(wqe, index=self.next_idx))
        if ring:
            self.ring()
        return first

    def run(self, limit: int = 1_000_000) -> int:
        """Runs the engine until it finds nothing to do."""
        total = 0
        if self.here.network:
            return self._run_until_quiet(limit)
        while total < limit and (steps := self.here.poll(1024)):
            total += steps
        return total

    def _run_until_quiet(self, limit: int) -> int:
        """Until everything that was rung is acknowledged, or nothing has happened for a second of
        processor time: on a busy machine one by the clock can pass without a look. Returns the
        entries that were completed."""
        before, last = self._num_done(), time.process_time()
        while time.process_time() - last < 1.0:
            if self.here.poll(limit):
                last = time.process_time()
            elif all(pi == ci for pi, ci in (qp.indices() for qp in self.qps)):
                break
        return self._num_done() - before

    def _num_done(self) -> int:
        stats = self.here.stats()
        return sum(stats["wqes"].values()) + stats["error_cqes"]

    def run_until(self, condition, timeout_s: float = 5.0) -> None:
        """Runs the engine until condition() holds (for what takes time, as retries do)."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the engine did not get there in time"
            self.here.poll(1024)

    def do(self, *wqes: Wqe) -> Cqe:
        """Posts, runs, returns the completion in entry 0."""
        self.post(*wqes)
        self.run()
        return self.cqe()

    # --- completions ----------------------------------------------------------------------
    def raw_cqe(self, entry: int = 0, qp=None) -> bytes:
        return ctypes.string_at((qp or self.qp).info.cq_addr + 64 * entry, 64)

    def cqe(self, entry: int = 0, qp=None) -> Cqe:
        return Cqe.decode(self.raw_cqe(entry, qp))

    def set_consumer(self, index: int, qp=None) -> None:
        addr = (qp or self.qp).info.cq_dbrec_addr
        ctypes.memmove(addr, struct.pack(">I", index & 0xFFFFFF), 4)

    def error(self, qp=None) -> int:
        """Syndrome of the queue's first error, 0 if there is none."""
        return (qp or self.qp).first_error()[0]


class DeviceRig(Rig):
    """A rig whose queue pairs are driven by ibgda_device.cuh (the ibgda_run kernel).

    chunk_bytes: regions of the key tables, so that one put becomes several entries.
    """

    def __init__(
        self, depth: int = 64, *, num_device_qps: int = 1, timeout_ns: int = 2_000_000_000,
        chunk_bytes: int | None = None, doorbell_mode: int | None = None, **options,
    ):
        if doorbell_mode is None:
            doorbell_mode = configured_doorbell()
        super().__init__(depth, **options)
        for _ in range(num_device_qps - 1):
            self.add_qp(depth)
        self._tables: list[ctypes.Array] = []
        self.scratch = self.here.alloc(4096)
        scratch_mr = self.here.register(self.scratch.addr, 4096, ALL_ACCESS)
        self.states = (IbgdaQp * num_device_qps)(*[
            IbgdaQp(
                sq_addr=qp.info.sq_addr, dbrec_addr=qp.info.dbrec_addr,
                doorbell_addr=qp.info.uar_addr + 0x800, cq_addr=qp.info.cq_addr,
                qpn=qp.info.qpn, num_wqe=qp.info.num_wqe, scope=1, doorbell_mode=doorbell_mode,
                proxy_addr=qp.info.proxy_addr, scratch_addr=self.scratch.addr + 16 * i,
                scratch_lkey_be=socket.htonl(scratch_mr.lkey),
            ) for i, qp in enumerate(self.qps)
        ])
        self.local_keys = self._keys(self.local, self.lkey, None)
        self.remote_keys = self._keys(self.remote, self.rkey, chunk_bytes)
        self.device_peer = IbgdaPeer(
            qps=ctypes.addressof(self.states), num_qps=num_device_qps,
            local_keys=ctypes.addressof(self.local_keys), num_local_keys=len(self.local_keys),
            remote_keys=ctypes.addressof(self.remote_keys),
            num_remote_keys=len(self.remote_keys), timeout_ns=timeout_ns,
        )

    @staticmethod
    def _keys(buffer, key, chunk_bytes):
        chunk_bytes = chunk_bytes or buffer.num_bytes
        begins = range(buffer.addr, buffer.addr + buffer.num_bytes, chunk_bytes)
        return (IbgdaKey * len(begins))(*[
            IbgdaKey(
                begin=at, end=min(at + chunk_bytes, buffer.addr + buffer.num_bytes),
                key_be=socket.htonl(key),
            ) for at in begins
        ])

    def start_at(self, index: int) -> None:
        super().start_at(index)
        state = self.states[0]
        state.resv_head = state.ready_head = state.prod_idx = state.cons_idx = index

    def close(self) -> None:
        super().close()
        self.scratch.close()

    def watched(self, *more: tuple[int, int]) -> list[tuple[int, int]]:
        """What others write to: completion queues, states of the queue pairs, and `more`."""
        queues = [(qp.info.cq_addr, 64) for qp in self.qps]
        return [*queues, (ctypes.addressof(self.states), ctypes.sizeof(self.states)), *more]

    def operation(self, op: int, remote_offset: int = 0, local_offset: int = 0, **fields) -> dict:
        return dict(
            op=op, remote_addr=self.remote.addr + remote_offset,
            local_addr=self.local.addr + local_offset, **fields,
        )

    def run_args(self, per_warp) -> tuple[IbgdaRunArgs, ctypes.Array]:
        """Arguments of the ibgda_run kernel and one KernelStatus per warp."""
        flat = [IbgdaOperation(**o) for operations in per_warp for o in operations]
        table = (IbgdaOperation * len(flat))(*flat)
        self._tables.append(table)  # several launches may be under way
        status = (KernelStatus * len(per_warp))()
        return IbgdaRunArgs(
            peer=ctypes.addressof(self.device_peer), operations=ctypes.addressof(table),
            status=ctypes.addressof(status), num_operations=len(per_warp[0]),
        ), status

    def launch(
        self, per_warp, *, warp_size: int = 4, seed: int | None = None, engine: bool = True,
        blocks: int = 1, watched: Sequence[tuple[int, int]] = (),
    ) -> list[KernelStatus]:
        """per_warp: one list of operations per warp, all of the same length.

        watched: as of `DeviceRig.watched`, with a seed.
        """
        args, status = self.run_args(per_warp)
        launch = Launch([("ibgda_run", args)], grid=blocks, warps=len(per_warp) // blocks,
                        warp_size=warp_size)
        hcas = hca_array(self.here.pointer) if engine else None
        if seed is None:
            launch.run(hcas)
        else:
            launch.run_seeded(seed, hcas, self.watched(*watched))
        return list(status)
