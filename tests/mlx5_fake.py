"""pyverbs as far as it is used, with no adapter behind it: every call is recorded and checked.

Firmware commands are read by rdma-core's layouts (mlx5_decode.py). What they name (send queues,
completion queues, doorbell records, register pages, keys) is handed to a software HCA, which then
executes what device code posts there: as an adapter would, from the same addresses.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
from dataclasses import dataclass, field
from types import SimpleNamespace

from expertwire.hca.mlx5 import Mlx5Hca
from expertwire.hca.soft import QpMemory, SoftHca
from tests.mlx5_decode import bits, decode, encode_answer

PAGE = 4096
DMABUFS: dict[int, int] = {}  # descriptor -> address, of what stands for GPU memory
STATES = {0x502: (0, 1), 0x503: (1, 2), 0x504: (2, 3)}  # opcode: from, to


class PyverbsError(Exception):
    def __init__(self, message: str, error_code: int = 0):
        super().__init__(message)
        self.error_code = error_code


@dataclass
class FakePort:
    """What a port query answers. gids: (index, ibv_gid_type, address)."""

    link_layer: int = 1
    lid: int = 0x11
    lmc: int = 0
    active_mtu: int = 5
    state: int = 4
    flags: int = 0
    pkeys: tuple[int, ...] = (0xFFFF,)
    gids: tuple[tuple[int, int, str], ...] = ((0, 0, "fe80::11"),)

    @property
    def pkey_tbl_len(self) -> int:
        return len(self.pkeys)

    @property
    def gid_tbl_len(self) -> int:
        return 16


@dataclass
class FakeCaps:
    general: dict = field(default_factory=lambda: dict(
        log_max_qp_sz=15, log_max_cq_sz=22, log_max_ra_req_qp=4, log_max_ra_res_qp=4,
        port_type=0, num_ports=1, log_max_msg=30, cqe_version=1, roce=0, atomic=1, rc=1,
        sq_ts_format=0))
    atomic: dict = field(default_factory=lambda: dict(atomic_operations=0xF, atomic_size_qp=0x1F8))
    roce: dict = field(default_factory=dict)


class Fabric:
    """Ports that reach each other, by LID or by GID."""

    def __init__(self) -> None:
        self.devices: list[FakeDevice] = []

    def find(self, path: dict, ethernet: bool) -> FakeDevice:
        for device in self.devices:
            for port in device.ports:
                raw = path.get("rgid_rip", 0).to_bytes(16, "big")
                if ethernet and any(ipaddress.IPv6Address(g[2]).packed == raw for g in port.gids):
                    return device
                lids = range(port.lid, port.lid + (1 << port.lmc))
                if not ethernet and path.get("rlid", 0) in lids:
                    return device
        raise AssertionError(f"nobody at {path}")


class FakeDevice:
    """One adapter. soft: the software HCA that executes its queues. `calls` has what was asked."""

    def __init__(self, fabric: Fabric, name: str = "mlx5_0", *ports: FakePort,
                 caps: FakeCaps | None = None, soft: SoftHca | None = None):
        self.fabric, self.name, self.ports = fabric, name, list(ports) or [FakePort()]
        self.caps = caps or FakeCaps()
        self.own_soft = soft is None
        self.soft = soft or SoftHca(thread=False)
        self.calls: list[tuple] = []
        self.open: list[object] = []  # in the order they were made
        self.fail: dict[str, int] = {}  # call -> errno
        self.umems: dict[int, SimpleNamespace] = {}
        self.uars: dict[int, SimpleNamespace] = {}
        self.cqs: dict[int, SimpleNamespace] = {}
        self.qps: dict[int, SimpleNamespace] = {}
        self.window = SoftHca.create_window(self.soft)
        self.region_fds: list[int] = []
        self.peers: list = []
        self.macs = {}  # dgid -> next hop
        fabric.devices.append(self)
        self.verbs = make_verbs(self)

    def note(self, call: str, **facts) -> None:
        if call in self.fail:
            raise PyverbsError(f"Failed: {call}", self.fail[call])
        self.calls.append((call, facts))

    def asked(self, call: str) -> list[dict]:
        return [facts for name, facts in self.calls if name == call]

    def command(self, opcode: int) -> list[dict]:
        return [facts for name, facts in self.calls if name == "devx" and facts["opcode"] == opcode]

    def close(self) -> None:
        assert not self.open, f"left open: {self.open}"
        for peer in self.peers:
            peer.close()
        self.window.close()
        for fd in self.region_fds:
            os.close(fd)
        if self.own_soft:
            self.soft.close()

    # ------------------------------------------------------------ what the firmware does
    def execute(self, raw: bytes, out_bytes: int) -> bytes:
        seen = decode(raw)
        opcode = seen["opcode"]
        self.note("devx", **seen)
        number = 0
        if opcode == 0x100:
            name, values = {1: ("cmd_hca_cap", self.caps.general), 7: ("atomic_caps",
                            self.caps.atomic), 9: ("roce_cap", self.caps.roce)}[seen["op_mod"]]
            return encode_answer(name, 128, out_bytes, **values)
        if opcode == 0x400:
            number = self._create_cq(seen)
        elif opcode == 0x500:
            number = self._create_qp(seen)
        elif opcode == 0x200:
            number = 0x4321 + len(self.command(0x200))
        elif opcode in STATES:
            self._modify(seen)
        elif opcode == 0x507:
            self.qps[seen["qpn"]].state = 6
            self.qps[seen["qpn"]].soft.modify(6)
        elif opcode == 0x50B:
            return encode_answer("qpc", 192, out_bytes, state=self.qps[seen["qpn"]].state)
        return number.to_bytes(12, "big").ljust(out_bytes, b"\0")

    def _create_cq(self, seen: dict) -> int:
        cqc = seen["sw_cqc"]
        memory, record = self.umems[seen["cq_umem_id"]], self.umems[cqc["dbr_umem_id"]]
        assert seen["cq_umem_valid"] == cqc["dbr_umem_valid"] == 1
        assert memory.size == 64 << cqc["log_cq_size"] and record.size == 8
        assert ctypes.string_at(memory.addr, memory.size) == b"\xff" * memory.size
        assert cqc["uar_page"] in self.uars and cqc["c_eqn"] == 0x2A
        self.cqs[0x500 + len(self.cqs)] = SimpleNamespace(
            addr=memory.addr, record=record.addr, num_cqe=1 << cqc["log_cq_size"],
            flags=cqc.get("cc", 0) | cqc.get("oi", 0) << 1)
        return 0x500 + len(self.cqs) - 1

    def _create_qp(self, seen: dict) -> int:
        qpc = seen["sw_qpc"]
        assert seen["wq_umem_valid"] == qpc["dbr_umem_valid"] == 1 and qpc["pd"] == 0x77
        ring, record = self.umems[seen["wq_umem_id"]], self.umems[qpc["dbr_umem_id"]]
        depth = 1 << qpc["log_sq_size"]
        assert ring.size == 64 * depth and record.size == 8
        assert qpc["cqn_snd"] == qpc["cqn_rcv"]
        cq, uar = self.cqs[qpc["cqn_snd"]], self.uars[qpc["uar_page"]]
        proxy = ctypes.c_uint64()
        soft = SoftHca.create_qp(self.soft, depth, num_cqe=cq.num_cqe, cq_flags=cq.flags,
                                 memory=QpMemory(
            sq_addr=ring.addr, dbrec_addr=record.addr, uar_addr=uar.base_addr, cq_addr=cq.addr,
            cq_dbrec_addr=cq.record, proxy_addr=ctypes.addressof(proxy)))
        self.qps[soft.info.qpn] = SimpleNamespace(soft=soft, state=0, proxy=proxy, fields={})
        return soft.info.qpn

    def _modify(self, seen: dict) -> None:
        qp = self.qps[seen["qpn"]]
        before, after = STATES[seen["opcode"]]
        assert qp.state == before, f"state {qp.state}, command {seen['opcode']:#x}"
        qp.state = after
        qp.fields[after] = seen["sw_qpc"]
        if after == 3:
            rtr = qp.fields[2]
            port = self.ports[rtr["primary_address_path"]["vhca_port_num"] - 1]
            there = self.fabric.find(rtr["primary_address_path"], port.link_layer == 2)
            peer = self.soft.import_peer(there.window.fd, there.soft.wake_fd, there.region_fds)
            self.peers.append(peer)
            qp.soft.connect(peer, rtr["remote_qpn"])

    def register(self, addr: int, num_bytes: int, access: int) -> tuple[int, int]:
        """The software HCA's keys; what a peer may use needs pages that it can map."""
        mr = SoftHca.register(self.soft, addr, num_bytes, access)
        if not access & 14:
            return mr.lkey, mr.lkey
        fd, offset = memfd_of(addr)
        self.region_fds.append(fd)
        return mr.lkey, self.window.publish(mr, len(self.region_fds) - 1, offset)


def memfd_of(addr: int) -> tuple[int, int]:
    """A descriptor of the shared memory at an address of this process, and the offset in it."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, _, offset, _, inode, *_ = line.split()
            begin, end = (int(part, 16) for part in span.split("-"))
            if begin <= addr < end:
                break
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.fstat(int(name)).st_ino == int(inode):
                return os.dup(int(name)), int(offset, 16) + addr - begin
        except OSError:
            continue
    raise PyverbsError("not shared memory", errno.EFAULT)


def make_verbs(device: FakeDevice) -> SimpleNamespace:
    """The names of expertwire.hca.mlx5.verbs.NAMES, with pyverbs' own signatures."""

    class Object:
        def _opened(self) -> None:
            device.open.append(self)

        def close(self) -> None:
            if self in device.open:
                device.open.remove(self)
                device.note(f"close {type(self).__name__}")

    class Mlx5DVContextAttr:
        def __init__(self, flags=0, comp_mask=0, fds=None):
            self.flags = flags

    class Mlx5Context(Object):
        def __init__(self, attr, name=""):
            device.note("open", name=name, flags=attr.flags)
            self._opened()

        def query_device(self):
            return SimpleNamespace(phys_port_cnt=len(device.ports))

        def query_port(self, port_num):
            device.note("query_port", port_num=port_num)
            return device.ports[port_num - 1]

        def query_pkey(self, port_num, index):
            return int.from_bytes(device.ports[port_num - 1].pkeys[index].to_bytes(2, "big"),
                                  "little")

        def query_gid_table(self, max_entries, flags=0):
            entries = [SimpleNamespace(port_num=number, gid_index=index, gid_type=kind)
                       for number, port in enumerate(device.ports, 1)
                       for index, kind, _ in port.gids]
            assert len(entries) <= max_entries
            return entries

        def query_gid(self, port_num, index):
            text = next(g[2] for g in device.ports[port_num - 1].gids if g[0] == index)
            return SimpleNamespace(gid=ipaddress.IPv6Address(text).exploded)

        def devx_general_cmd(self, in_, outlen):
            return device.execute(bytes(in_), outlen)

        def devx_query_eqn(self, vector):
            device.note("query_eqn", vector=vector)
            return 0x2A

    class PD(Object):
        pd = 0xAD0

        def __init__(self, creator):
            device.note("PD")
            self._opened()

    class Mlx5DvObj:
        def __init__(self, obj_type=None, **kwargs):
            assert obj_type == 64 and isinstance(kwargs["pd"], PD)
            self.dvpd = SimpleNamespace(pdn=0x77)

    class MR(Object):
        def __init__(self, creator, length=0, access=0, address=None, implicit=False):
            device.note("MR", length=length, access=access, address=address)
            assert isinstance(creator, PD) and not implicit
            self.lkey, self.rkey = device.register(address, length, access)
            self._opened()

        def close(self):
            if self in device.open:
                SoftHca.revoke(device.soft, SimpleNamespace(lkey=self.lkey))
            super().close()

    class Mlx5UMEM(Object):
        def __init__(self, context, size, addr=None, alignment=64, access=0, pgsz_bitmap=0,
                     comp_mask=0, dmabuf_fd=0):
            device.note("UMEM", size=size, addr=addr, access=access, pgsz_bitmap=pgsz_bitmap,
                        comp_mask=comp_mask, dmabuf_fd=dmabuf_fd)
            assert addr is not None and addr % PAGE == 0
            if comp_mask:
                addr += DMABUFS[dmabuf_fd]
            self.size, self.addr, self.umem_id = size, addr, 0x90 + len(device.umems)
            device.umems[self.umem_id] = self
            self._opened()

    class Mlx5UAR(Object):
        def __init__(self, context, flags=0):
            device.note(f"UAR {flags:#x}")
            self._page = (ctypes.c_uint8 * (2 * PAGE))()
            self.base_addr = -(-ctypes.addressof(self._page) // PAGE) * PAGE
            self.reg_addr, self.page_id = self.base_addr + 0x800, 0x60 + len(device.uars)
            device.uars[self.page_id] = self
            self._opened()

    class Mlx5DevxObj(Object):
        def __init__(self, context, in_, outlen):
            self.out_view = memoryview(device.execute(bytes(in_), outlen))
            self.opcode, self.number = bits(bytes(in_), 0, 16), bits(bytes(self.out_view), 72, 24)
            self._opened()

        def modify(self, in_, outlen):
            return device.execute(bytes(in_), outlen)

        query = modify

        def close(self):
            if self in device.open and self.opcode == 0x500:
                qp = device.qps.pop(self.number)  # its proxy word lives until the queue is gone
                qp.soft.destroy()
            super().close()

    def get_device_list():
        device.note("get_device_list")
        return [SimpleNamespace(name=device.name.encode())]

    def ah_mac(pd, path):
        device.note("ah", pd=pd, **vars(path))
        return device.macs.get(path.dgid, bytes.fromhex("0200c0ffee01"))

    return SimpleNamespace(
        PyverbsError=PyverbsError, get_device_list=get_device_list, PD=PD, MR=MR, ah_mac=ah_mac,
        Mlx5Context=Mlx5Context, Mlx5DVContextAttr=Mlx5DVContextAttr, Mlx5DevxObj=Mlx5DevxObj,
        Mlx5UAR=Mlx5UAR, Mlx5UMEM=Mlx5UMEM, Mlx5DvObj=Mlx5DvObj,
    )


def connected(here: Mlx5Hca, there: Mlx5Hca, depth: int = 64):
    """A queue pair of each, connected with the other. Returns both."""
    windows = here.create_window(), there.create_window()
    ends = here.create_qp(depth), there.create_qp(depth)
    for hca, own, qp, window, remote in (
        (here, windows[0], ends[0], windows[1], ends[1]),
        (there, windows[1], ends[1], windows[0], ends[0]),
    ):
        qp.connect(hca.connect_peer(own, window.wire), remote.info.qpn)
    return ends
