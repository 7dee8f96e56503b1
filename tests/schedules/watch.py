"""What an adapter could rely on, checked at every entry that the engine takes up."""

from __future__ import annotations

import ctypes
import struct

from tests.conformance.rig import NOP, DeviceRig


def advance(rig: DeviceRig, blocks: int) -> None:
    """Brings the queue and its device state to index `blocks` (a multiple of 16) with long NOPs."""
    info, record = rig.qp.info, ctypes.c_uint32.from_address(rig.qp.info.dbrec_addr + 4)
    for idx in range(0, blocks, 16):
        ctrl = struct.pack(">IIII", (idx & 0xFFFF) << 8 | NOP, info.qpn << 8 | 63, 8, 0)
        ctypes.memmove(info.sq_addr + 64 * (idx % info.num_wqe), ctrl, 16)
        record.value = int.from_bytes(struct.pack("<I", idx + 16 & 0xFFFF), "big")
        rig.here.poll(1)
    rig.set_register(blocks)
    state = rig.states[0]
    state.resv_head = state.ready_head = state.prod_idx = state.cons_idx = blocks
    ctypes.c_uint64.from_address(info.proxy_addr).value = blocks
    rig.run()
    assert rig.qp.indices() == (blocks, blocks) and rig.error() == 0


class Watch:
    """Hook of the engine: logs entries, and looks at the doorbells each time.

    fail_at: index of the entry that fails with `syndrome`.
    """

    def __init__(self, rig: DeviceRig, *, fail_at: int | None = None, syndrome: int = 0x13):
        self.rig, self.fail_at, self.syndrome = rig, fail_at, syndrome
        self.start = rig.qp.indices()[0]
        self.log: list[int] = []
        self.faults: list[str] = []
        self._record = self._register = self.start & 0xFFFF
        rig.here.set_hook(self._on_entry)

    def _on_entry(self, _context, qpn, idx, _wqe, _num_bytes) -> int:
        if qpn == self.rig.qp.info.qpn:
            self.log.append(idx)
            self.look()
        return self.syndrome if idx == self.fail_at else 0

    def look(self) -> None:
        info = self.rig.qp.info
        receive, send = struct.unpack(">II", ctypes.string_at(info.dbrec_addr, 8))
        low, _ = struct.unpack(">II", ctypes.string_at(info.uar_addr + 0x800, 8))
        register = low >> 8 & 0xFFFF
        if receive:
            self.faults.append("the receive counter of the doorbell record changed")
        if send - self._record & 0xFFFF >= 0x8000:
            self.faults.append("the doorbell record went backwards")
        self._record = send
        if self.rig.states[0].doorbell_mode != 0 or low == 0:
            return  # not rung yet, or never
        if 0 < (register - send & 0xFFFF) < 0x8000:
            self.faults.append("the register was ahead of the doorbell record")
        if register - self._register & 0xFFFF >= 0x8000:
            self.faults.append("the register went backwards")
        self._register = register

    def finish(self) -> None:
        """After the launch: everything that was reserved was rung, executed once, in order."""
        self.rig.run()
        self.rig.here.set_hook(None)
        self.look()
        end = self.rig.states[0].resv_head
        assert not self.faults, self.faults[0]
        assert self._record == end & 0xFFFF, "the doorbell record does not say the last index"
        if self.rig.states[0].doorbell_mode == 0:
            assert self._register == end & 0xFFFF, "the register does not say the last index"
        assert self.log == list(range(self.start, end)), "entries lost, doubled or out of order"
        assert self.rig.error() == 0
