"""One reliable queue pair: its memory, its collapsed completion queue, and its states."""

from __future__ import annotations

import ctypes
import logging
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError, HcaError
from ..interface import QpInfo
from ..soft import CQ_COLLAPSED, CQ_OVERRUN_IGNORE
from ..wqe import Cqe
from . import path, prm
from .device import Device
from .memory import Block, umem
from .verbs import UAR_NC, UAR_NC_DEDICATED, doing, errno_of

if TYPE_CHECKING:
    from .hca import Mlx5Hca, Mlx5Peer

log = logging.getLogger("expertwire.mlx5")

PART_BYTES = 1 << 16  # parts of a block begin at multiples of it: pages of a GPU
MIN_DEPTH, MAX_DEPTH = 16, 32768
CQE_INVALID = 15


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // PART_BYTES) * PART_BYTES


def block_bytes(depth: int) -> int:
    """Memory of a queue pair: send queue, completion queue and the two doorbell records."""
    return 2 * _round_up(depth * 64) + 2 * PART_BYTES


def alloc_uar(device: Device) -> Any:
    """A register page whose stores are not combined or delayed (no BlueFlame)."""
    verbs = device.verbs
    try:
        return verbs.Mlx5UAR(device.context, UAR_NC_DEDICATED)
    except verbs.PyverbsError as err:
        log.debug("no dedicated register page (errno %d), taking a shared one", errno_of(err))
    with doing(verbs, "allocating an uncached register page (Linux 5.8, rdma-core 31 or newer)"):
        return verbs.Mlx5UAR(device.context, UAR_NC)


class Mlx5Qp:
    """A queue pair (interface.QueuePair). depth: 64-byte blocks of its send queue.

    Raises ConfigError for a depth that the adapter does not have, and errors.py's.
    """

    def __init__(self, hca: Mlx5Hca, depth: int, block: Block, *, proxy_addr: int = 0):
        device = hca.device
        largest = min(MAX_DEPTH, 1 << min(device.caps.log_max_sq, device.caps.log_max_cq))
        if depth & (depth - 1) or not MIN_DEPTH <= depth <= largest:
            raise ConfigError(f"a send queue of {device.name} has {MIN_DEPTH} to {largest} blocks, "
                              f"a power of two, not {depth}")
        self._hca, self._device, self.block = hca, device, block
        self.state = "RESET"
        self._first_error = (0, 0)
        self._parts: list[Any] = []  # in the order they are made; given back in the other
        try:
            self._create(depth, proxy_addr)
        except BaseException:
            self.destroy()
            raise

    def _keep(self, part: Any) -> Any:
        self._parts.append(part)
        return part

    def _create(self, depth: int, proxy_addr: int) -> None:
        device, block, ring = self._device, self.block, _round_up(depth * 64)
        cq_at, dbrec_at, cq_dbrec_at = ring, 2 * ring, 2 * ring + PART_BYTES
        # "Nothing completed yet": with zeros, device code would take entry 0 for completed.
        block.fill(cq_at, depth * 64, 0xFF)
        uar = self._keep(alloc_uar(device))
        log_depth = depth.bit_length() - 1

        cq = self._keep(umem(device, block, cq_at, depth * 64, "completion queue"))
        cq_dbrec = self._keep(umem(device, block, cq_dbrec_at, 8, "completion queue's record"))
        with doing(device.verbs, "asking for an event queue"):
            eqn = device.context.devx_query_eqn(0)
        cqn = self._make(
            prm.CREATE_CQ, cq_umem_valid=1, cq_umem_id=cq.umem_id,
            # All completions in entry 0, and no consumer index to keep up with.
            cqc={"cc": 1, "oi": 1, "log_cq_size": log_depth, "uar_page": uar.page_id,
                 "c_eqn": eqn, "dbr_umem_valid": 1, "dbr_umem_id": cq_dbrec.umem_id},
        )
        sq = self._keep(umem(device, block, 0, depth * 64, "send queue"))
        dbrec = self._keep(umem(device, block, dbrec_at, 8, "doorbell record"))
        qpn = self._make(
            prm.CREATE_QP, wq_umem_valid=1, wq_umem_id=sq.umem_id,
            qpc={"st": prm.ST_RC, "pm_state": prm.PM_MIGRATED, "pd": device.pdn,
                 "log_sq_size": log_depth, "rq_type": prm.RQ_NONE, "uar_page": uar.page_id,
                 "cqn_snd": cqn, "cqn_rcv": cqn, "ts_format": device.caps.ts_format,
                 "dbr_umem_valid": 1, "dbr_umem_id": dbrec.umem_id},
        )
        self._object = self._parts[-1]
        self.uar = uar
        self.info = QpInfo(
            qpn=qpn, num_wqe=depth, num_cqe=depth, cq_flags=CQ_COLLAPSED | CQ_OVERRUN_IGNORE,
            sq_addr=block.addr, cq_addr=block.addr + cq_at, dbrec_addr=block.addr + dbrec_at,
            cq_dbrec_addr=block.addr + cq_dbrec_at, proxy_addr=proxy_addr,
            # Where device code adds 0x800 to get the register (connection.Endpoint).
            uar_addr=uar.reg_addr - 0x800,
        )

    def _make(self, opcode: int, **fields: Any) -> int:
        """Creates a firmware object; returns its number."""
        device, name = self._device, prm.OPCODE_NAMES[opcode]
        with doing(device.verbs, f"{name} on {device.name}"):
            made = self._keep(device.verbs.Mlx5DevxObj(
                device.context, prm.command(opcode, **fields), prm.CREATED_BYTES))
        out = bytes(made.out_view)
        device.check(out, prm.CREATED, name)
        return prm.get(out, prm.CREATED, "number")

    # ---------------------------------------------------------------- states

    def _modify(self, opcode: int, state: str, **fields: Any) -> None:
        device, name = self._device, prm.OPCODE_NAMES[opcode]
        raw = prm.command(opcode, qpn=self.info.qpn, **fields)
        with doing(device.verbs, f"{name} of queue pair {self.info.qpn:#x}"):
            out = self._object.modify(raw, prm.MODIFIED_BYTES)
        device.check(bytes(out), prm.CREATED, name)
        self.state = state

    def connect(self, peer: Mlx5Peer, remote_qpn: int) -> None:
        """RESET -> INIT -> RTR -> RTS towards the peer's queue pair.

        Raises LinkMismatch where the peer cannot be reached, CommandRefused.
        """
        device, address = self._device, peer.address
        port, caps, config = device.port, device.caps, device.config
        rmac = bytes(6)
        if port.is_ethernet:
            rmac = device.next_hop(path.next_hop_path(port, address, config))
        fields = path.path_fields(port, address, config, qpn=self.info.qpn,
                                  remote_qpn=remote_qpn, rmac=rmac)
        self._modify(prm.RST2INIT_QP, "INIT", qpc=path.to_init(port, caps))
        self._modify(prm.INIT2RTR_QP, "RTR", qpc=path.to_rtr(
            port, caps, address, config, remote_qpn=remote_qpn, path=fields))
        self._modify(prm.RTR2RTS_QP, "RTS", qpc=path.to_rts(
            port, caps, address, config, peer.own_psn))
        peer.queues.append(self)

    def fail(self) -> None:
        """To the error state: everything that is posted completes as flushed."""
        if self.state not in ("ERR", "RESET"):
            self._modify(prm.QP_2ERR, "ERR")

    def query_state(self) -> int:
        """The state as the firmware has it: 0 RST, 1 INIT, 2 RTR, 3 RTS, 4 SQE, 6 ERR
        (mlx5_ifc.h names 5 SQDRAINED; Linux qp.h the others)."""
        raw = prm.command(prm.QUERY_QP, qpn=self.info.qpn)
        with doing(self._device.verbs, f"asking for queue pair {self.info.qpn:#x}"):
            out = bytes(self._object.query(raw, prm.QUERY_QP_OUT_BYTES))
        self._device.check(out, prm.QUERY_QP_OUT, "QUERY_QP")
        return prm.get(out, prm.QUERY_QP_OUT, "qpc.state")

    def first_error(self) -> tuple[int, int]:
        """(syndrome, WQE index) of the first error completion that was seen, (0, 0) if none.

        The one entry of a collapsed queue shows the last completion, so what was flushed behind an
        error hides it from whoever looks late; device code looks at every wait.
        """
        if self._first_error[0] == 0 and self.block.is_host and self.block.addr:
            cqe = Cqe.decode(ctypes.string_at(self.info.cq_addr, 64))
            if cqe.is_error:
                self._first_error = (cqe.syndrome, cqe.wqe_counter)
        return self._first_error

    def destroy(self) -> None:
        """Gives everything back, the queue pair first. Idempotent."""
        self._hca.forget(self)
        self.state = "RESET"
        failed: list[Exception] = []
        while self._parts:
            try:
                self._parts.pop().close()
            except self._device.verbs.PyverbsError as err:
                failed.append(err)
        self.block.close()
        if failed:
            raise HcaError(f"giving back a queue pair of {self._device.name}: {failed[0]}; it is "
                           "the process's until it ends")
