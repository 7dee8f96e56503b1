"""A software HCA with a queue pair to itself, driven by hand."""

from __future__ import annotations

import contextlib
import ctypes

from expertwire.hca import open_hca
from expertwire.hca.wqe import (
    Cqe,
    DataSegment,
    Wqe,
    doorbell_record,
    doorbell_register,
)

SIZE = 1 << 20
ALL_ACCESS = 15


class Rig:
    """One HCA with a queue pair to itself: `src` is local, `dst` is what the peer owns."""

    def __init__(self, depth=64, access=ALL_ACCESS, **qp_options):
        self.stack = contextlib.ExitStack()
        self.hca = open_hca("soft", thread=False)
        self.src, self.dst = self.hca.alloc(SIZE), self.hca.alloc(SIZE)
        self.src_mr = self.hca.register(self.src.addr, SIZE, ALL_ACCESS)
        self.dst_mr = self.hca.register(self.dst.addr, SIZE, access)
        self.window = self.hca.create_window()
        self.rkey = self.window.publish(self.dst_mr, 0)
        self.peer = self.hca.import_peer(self.window.fd, self.hca.wake_fd, [self.dst.fd])
        self.qp = self.hca.create_qp(depth, **qp_options)
        self.qp.connect(self.peer, self.qp.info.qpn)
        self.next = 0

    def close(self):
        self.qp.destroy()
        self.peer.close()
        self.window.close()
        self.hca.close()
        self.src.close()
        self.dst.close()

    def write_blocks(self, index, raw):
        info = self.qp.info
        for block in range(-(-len(raw) // 64)):
            slot = (index + block) % info.num_wqe
            ctypes.memmove(info.sq_addr + slot * 64, raw[block * 64 : block * 64 + 64],
                           len(raw[block * 64 : block * 64 + 64]))

    def ring(self, index, record=True, register=True, offset=0x800):
        info = self.qp.info
        if record:
            ctypes.memmove(info.dbrec_addr, doorbell_record(index), 8)
        if register:
            ctypes.memmove(info.uar_addr + offset, doorbell_register(index, info.qpn), 8)

    def post(self, opcode, *, data=None, inline=None, raddr=None, rkey=None, ring=True, **fields):
        wqe = Wqe(opcode, self.next, self.qp.info.qpn, raddr, rkey,
                  tuple(data or ()), inline, **fields)
        raw = wqe.encode()
        self.write_blocks(self.next, raw)
        self.next += -(-len(raw) // 64)
        if ring:
            self.ring(self.next)
            while self.hca.poll(1000):
                pass
        return wqe

    def write(self, num_bytes=8, src=0, dst=0, **fields):
        return self.post(
            0x08, data=[DataSegment(num_bytes, self.src_mr.lkey, self.src.addr + src)],
            raddr=self.dst.addr + dst, rkey=self.rkey, **fields,
        )

    def cqe(self, entry=0):
        return Cqe.decode(ctypes.string_at(self.qp.info.cq_addr + entry * 64, 64))

    def fill(self, buffer, at, data):
        ctypes.memmove(buffer.addr + at, data, len(data))

    def bytes(self, buffer, at, count):
        return ctypes.string_at(buffer.addr + at, count)
