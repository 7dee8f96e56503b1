"""An adapter: opened with DevX, its capabilities, and what its port says of itself."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ...errors import ConfigError
from . import prm
from .config import MTUS, Mlx5Config
from .errors import CommandRefused, DeviceNotFound, DeviceRefused, LinkMismatch, PortDown
from .verbs import CONTEXT_DEVX, OBJ_PD, doing, load

ACTIVE, ACTIVE_DEFER = 4, 5  # ibv_port_state
STATES = {0: "NOP", 1: "DOWN", 2: "INIT", 3: "ARMED", 4: "ACTIVE", 5: "ACTIVE_DEFER"}
INFINIBAND, ETHERNET = 1, 2  # ibv_port_attr.link_layer; 0 means InfiniBand too
GRH_REQUIRED = 1  # ibv_port_attr.flags, IBV_QPF_GRH_REQUIRED
GID_IB, GID_ROCE_V1, GID_ROCE_V2 = 0, 1, 2  # ibv_gid_type
GID_NAMES = {GID_IB: "InfiniBand", GID_ROCE_V1: "RoCE v1", GID_ROCE_V2: "RoCE v2"}
DEFAULT_PARTITION = 0x7FFF
# Bits of atomic_operations and of atomic_size_qp (Linux include/linux/mlx5/driver.h)
EXTENDED_FETCH_ADD, EIGHT_BYTES = 1 << 3, 1 << 3


@dataclass(frozen=True)
class Gid:
    """An entry of the port's table: where it is, of which kind (ibv_gid_type), 16 bytes."""

    index: int
    kind: int
    raw: bytes

    @property
    def address(self) -> ipaddress.IPv6Address:
        return ipaddress.IPv6Address(self.raw)

    def __str__(self) -> str:
        mapped = self.address.ipv4_mapped
        return f"{self.index}: {GID_NAMES.get(self.kind, self.kind)} {mapped or self.address}"


@dataclass(frozen=True)
class Port:
    """A port, as its query answered. mtu: ibv_mtu; lid: the one that packets come to."""

    number: int
    link_layer: int
    lid: int
    mtu: int
    pkey_index: int
    gid: Gid
    grh_required: bool

    @property
    def is_ethernet(self) -> bool:
        return self.link_layer == ETHERNET


@dataclass(frozen=True)
class Caps:
    """What the firmware can do. Sizes are base-2 logarithms."""

    log_max_sq: int
    log_max_cq: int
    log_max_msg: int
    log_reads_out: int
    log_reads_in: int
    ts_format: int
    atomics: bool
    masked_atomics: bool


class Device:
    """An open adapter with a protection domain. Raises one of errors.py.

    name: as in /sys/class/infiniband. verbs: pyverbs' classes; None loads it.
    """

    def __init__(self, name: str, config: Mlx5Config, verbs: SimpleNamespace | None = None):
        self.name, self.config = name, config
        self.verbs = verbs or load()
        self._check_name()
        with doing(self.verbs, f"opening {name} for DevX"):
            attr = self.verbs.Mlx5DVContextAttr(flags=CONTEXT_DEVX)
            self.context = self.verbs.Mlx5Context(attr, name)
        try:
            self.caps = self._query_caps()
            self.port = self._query_port()
            with doing(self.verbs, "allocating a protection domain"):
                self.pd = self.verbs.PD(self.context)
                self.pdn = self.verbs.Mlx5DvObj(OBJ_PD, pd=self.pd).dvpd.pdn
        except BaseException:
            self.context.close()
            raise

    def _check_name(self) -> None:
        try:
            devices = self.verbs.get_device_list()
        except self.verbs.PyverbsError:
            devices = []  # how pyverbs says that there are no drivers at all
        names = [device.name.decode() if isinstance(device.name, bytes) else device.name
                 for device in devices]
        if self.name not in names:
            there = f"there are {', '.join(names)}" if names else \
                "there is no RDMA device at all (modprobe mlx5_ib; `expertwire doctor` says more)"
            raise DeviceNotFound(f"no RDMA device {self.name!r}: {there}")

    # ---------------------------------------------------------------- firmware

    def query(self, opcode: int, layout: prm.Layout, num_bytes: int, **fields: int) -> bytes:
        """A command that changes nothing; returns the answer."""
        name = prm.OPCODE_NAMES[opcode]
        with doing(self.verbs, f"{name} of {self.name}"):
            out = self.context.devx_general_cmd(prm.command(opcode, **fields), num_bytes)
        self.check(out, layout, name)
        return out

    def check(self, out: bytes, layout: prm.Layout, what: str) -> None:
        if status := prm.get(out, layout, "status"):
            syndrome = prm.get(out, layout, "syndrome")
            raise CommandRefused(f"{self.name} refused {what}: status {status:#x}, firmware "
                                 f"syndrome {syndrome:#x} (`dmesg | tail`)")

    def _query_caps(self) -> Caps:
        def ask(which: int, layout: prm.Layout) -> dict[str, int]:
            out = self.query(prm.QUERY_HCA_CAP, layout, prm.QUERY_CAP_BYTES, op_mod=which)
            return {name: prm.get(out, layout, name) for name in layout}

        general = ask(prm.CAP_GENERAL, prm.GENERAL_CAP)
        if not general["rc"] or general["cqe_version"] != 1:
            raise DeviceRefused(
                f"{self.name}: reliable connections {general['rc']}, CQE version "
                f"{general['cqe_version']}; it takes 1 and 1: a ConnectX-4 or newer"
            )
        # As libmlx5 chooses: the default format where the firmware knows formats at all.
        formats = general["sq_ts_format"]
        if general["roce"]:
            formats = ask(prm.CAP_ROCE, prm.ROCE_CAP)["qp_ts_format"]
        masked = False
        if general["atomic"]:
            atomic = ask(prm.CAP_ATOMIC, prm.ATOMIC_CAP)
            masked = bool(atomic["atomic_operations"] & EXTENDED_FETCH_ADD
                          and atomic["atomic_size_qp"] & EIGHT_BYTES)
        return Caps(
            log_max_sq=general["log_max_qp_sz"], log_max_cq=general["log_max_cq_sz"],
            log_max_msg=general["log_max_msg"], log_reads_out=general["log_max_ra_req_qp"],
            log_reads_in=general["log_max_ra_res_qp"],
            ts_format=prm.TS_DEFAULT if formats else prm.TS_FREE_RUNNING,
            atomics=bool(general["atomic"]), masked_atomics=masked,
        )

    # ---------------------------------------------------------------- port

    def _query_port(self) -> Port:
        config, number = self.config, self.config.port
        count = self.context.query_device().phys_port_cnt
        if number > count:
            raise ConfigError(f"{self.name} has {count} ports, there is no port {number}")
        with doing(self.verbs, f"asking {self.name} for port {number}"):
            attr = self.context.query_port(number)
        if attr.state not in (ACTIVE, ACTIVE_DEFER):
            raise PortDown(
                f"port {number} of {self.name} is {STATES.get(attr.state, attr.state)}: " + (
                    "a subnet manager (opensm) must run on this fabric" if attr.state in (2, 3)
                    else "plug in the cable, or `ip link set <interface> up`"))
        layer = ETHERNET if attr.link_layer == ETHERNET else INFINIBAND
        lid = attr.lid
        if layer == INFINIBAND:
            if lid == 0 and not attr.flags & GRH_REQUIRED:
                raise PortDown(f"port {number} of {self.name} has no LID yet: a subnet manager "
                               "(opensm) must run on this fabric")
            if config.path_bits >> attr.lmc:
                raise ConfigError(f"mlx5 path_bits {config.path_bits}: port {number} has LMC "
                                  f"{attr.lmc}, so below {1 << attr.lmc}")
            lid += config.path_bits
        elif config.path_bits:
            raise ConfigError("mlx5 path_bits are for InfiniBand, this port is Ethernet")
        elif config.sl > 7:
            raise ConfigError(f"mlx5 sl {config.sl}: on RoCE it is a priority, from 0 to 7")
        mtu = attr.active_mtu
        if config.mtu is not None:
            mtu = min(mtu, MTUS[config.mtu])
        return Port(
            number, layer, lid, mtu, self._pkey_index(number, attr.pkey_tbl_len),
            choose_gid(self._gids(number, attr.gid_tbl_len, layer), layer, config.gid_index,
                       f"port {number} of {self.name}"),
            bool(attr.flags & GRH_REQUIRED),
        )

    def _pkey_index(self, port: int, length: int) -> int:
        """Where the wanted partition is in the port's table."""
        wanted = self.config.pkey
        keys = []
        with doing(self.verbs, f"reading the partition keys of port {port}"):
            for index in range(length):
                raw = self.context.query_pkey(port, index)  # big-endian, as libibverbs gives it
                keys.append((raw & 0xFF) << 8 | raw >> 8)
        number = (DEFAULT_PARTITION if wanted is None else wanted) & 0x7FFF
        found = [i for i, key in enumerate(keys) if key & 0x7FFF == number]
        # A full member (bit 15) talks to everybody, a limited one to full members only.
        found.sort(key=lambda i: not keys[i] & 0x8000)
        if not found:
            shown = ", ".join(f"{key:#06x}" for key in keys if key) or "none"
            raise LinkMismatch(f"port {port} of {self.name} is not in partition {number:#06x}; its "
                               f"keys: {shown}. Set EXPERTWIRE_MLX5_PKEY, on all hosts alike")
        return found[0]

    def _gids(self, port: int, length: int, layer: int) -> list[Gid]:
        found = []
        with doing(self.verbs, f"reading the GIDs of port {port}"):
            # One question gives all ports; what is not filled is left out.
            count = length * self.context.query_device().phys_port_cnt
            for entry in self.context.query_gid_table(count):
                if entry.port_num != port:
                    continue
                text = self.context.query_gid(port, entry.gid_index).gid
                kind = entry.gid_type if layer == ETHERNET else GID_IB
                found.append(Gid(entry.gid_index, kind, ipaddress.IPv6Address(text).packed))
        return found

    def next_hop(self, path: Any) -> bytes:
        return self.verbs.ah_mac(self.pd.pd, path)

    def close(self) -> None:
        self.pd.close()
        self.context.close()


def choose_gid(gids: list[Gid], layer: int, wanted: int | None, where: str) -> Gid:
    """The entry with the wanted index, or the one that most networks are set up for: on RoCE
    version 2 before 1, and IPv4 before routable IPv6 before link-local; then the lowest index.

    Raises LinkMismatch if there is none.
    """
    shown = "; ".join(map(str, gids)) or "none"
    if wanted is not None:
        for gid in gids:
            if gid.index == wanted:
                return gid
        raise LinkMismatch(f"{where} has no GID index {wanted}; it has {shown}")
    if not gids:
        raise LinkMismatch(f"{where} has no GID: " + (
            "give its network interface an address" if layer == ETHERNET else
            "a subnet manager must configure it"))
    if layer != ETHERNET:
        return min(gids, key=lambda gid: gid.index)

    def rank(gid: Gid) -> tuple:
        address = gid.address
        return (gid.kind != GID_ROCE_V2, address.ipv4_mapped is None, address.is_link_local,
                gid.index)

    return min(gids, key=rank)
