"""The attributes of a queue pair's way to its peer, state by state, for InfiniBand and for RoCE.

Every value comes from a port query (here or, by the handshake, at the peer), from the firmware's
capabilities, or from Mlx5Config. What is not set is zero.
"""

from __future__ import annotations

from . import prm
from .address import Address
from .config import Mlx5Config
from .device import GID_ROCE_V2, Caps, Port
from .next_hop import Path

LOG_MESSAGE_LIMIT = 30  # a put is cut at 1 GiB (device/ibgda_device.cuh)


def needs_route(port: Port, peer: Address) -> bool:
    """Whether packets carry a global route header: always on RoCE; on InfiniBand when the port
    demands it or the peer is in another subnet (the first half of a GID)."""
    return port.is_ethernet or port.grh_required or port.gid.raw[:8] != peer.gid[:8]


def udp_port(qpn: int, remote_qpn: int) -> int:
    """RoCE v2's source port, from the range that RFC 6335 leaves free: queue pairs differ, so
    that switches that spread flows spread them."""
    low, high = sorted((qpn, remote_qpn))
    return 0xC000 | (low * 31 ^ high * 17 ^ low >> 9 ^ high >> 7) & 0x3FFF


def next_hop_path(port: Port, peer: Address, config: Mlx5Config) -> Path:
    return Path(peer.gid, port.gid.index, port.number, config.hop_limit, config.traffic_class,
                config.flow_label, config.sl)


def path_fields(
    port: Port, peer: Address, config: Mlx5Config, *, qpn: int, remote_qpn: int, rmac: bytes,
) -> dict[str, int]:
    """The address path. rmac: the next hop's, for RoCE."""
    fields = {"pkey_index": port.pkey_index, "vhca_port_num": port.number}
    if needs_route(port, peer):
        fields |= {
            "src_addr_index": port.gid.index, "hop_limit": config.hop_limit,
            "tclass": config.traffic_class, "flow_label": config.flow_label,
            "rgid_rip": int.from_bytes(peer.gid, "big"),
        }
    if port.is_ethernet:
        fields |= {"rmac": int.from_bytes(rmac, "big"), "eth_prio": config.sl}
        if port.gid.kind == GID_ROCE_V2:
            fields |= {"udp_sport": udp_port(qpn, remote_qpn), "dscp": config.traffic_class >> 2}
        return fields
    return fields | {"rlid": peer.lid, "mlid": config.path_bits, "sl": config.sl,
                     "grh": int(needs_route(port, peer))}


def to_init(port: Port, caps: Caps) -> dict[str, int]:
    """RESET to INIT: the port, the partition, and what the peer may do here."""
    atomics = {"rae": 1, "atomic_mode": prm.ATOMIC_UP_TO_8_BYTES} if caps.atomics else {}
    return {"pm_state": prm.PM_MIGRATED, "rre": 1, "rwe": 1, **atomics,
            "path.vhca_port_num": port.number, "path.pkey_index": port.pkey_index}


def to_rtr(
    port: Port, caps: Caps, peer: Address, config: Mlx5Config, *, remote_qpn: int, path: dict,
) -> dict[str, int]:
    """INIT to RTR: the way to the peer. The MTU is the smaller of the two ports'."""
    return {
        "mtu": min(port.mtu, peer.mtu), "log_msg_max": min(LOG_MESSAGE_LIMIT, caps.log_max_msg),
        "remote_qpn": remote_qpn, "next_rcv_psn": peer.psn, "min_rnr_nak": config.min_rnr_timer,
        "log_rra_max": log_reads_in(caps, config),
        **{f"path.{name}": value for name, value in path.items()},
    }


def to_rts(port: Port, caps: Caps, peer: Address, config: Mlx5Config, psn: int) -> dict[str, int]:
    """RTR to RTS: retries, and no more reads at a time than the peer answers."""
    return {
        "log_ack_req_freq": 0, "next_send_psn": psn, "retry_count": config.retry_count,
        "rnr_retry": config.rnr_retry, "log_sra_max": min(log_reads_out(caps, config),
                                                          peer.log_reads),
        "path.ack_timeout": config.ack_timeout, "path.vhca_port_num": port.number,
    }


def log_reads_in(caps: Caps, config: Mlx5Config) -> int:
    return min(caps.log_reads_in, config.max_rd_atomic.bit_length() - 1)


def log_reads_out(caps: Caps, config: Mlx5Config) -> int:
    return min(caps.log_reads_out, config.max_rd_atomic.bit_length() - 1)
