"""What the two ends of a connection tell each other of their ports.

28 bytes, little-endian: u8 version | u8 link layer | u8 GID kind | u8 ibv_mtu | u16 LID | u8 log2
of the reads and atomics that this end answers at a time | u8 0 | u32 first packet number | 16 bytes
GID. Queue pair numbers, memory and keys travel in the handles that every HCA has.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ...errors import HandleError
from .device import ETHERNET, GID_NAMES, INFINIBAND, Port
from .errors import LinkMismatch

_LAYOUT = struct.Struct("<BBBBHBBI16s")
VERSION = 1


@dataclass(frozen=True)
class Address:
    """One end's port. psn: of its queue pairs' first packet, 24 bits."""

    link_layer: int
    gid_kind: int
    mtu: int
    lid: int
    log_reads: int
    psn: int
    gid: bytes

    @classmethod
    def of(cls, port: Port, log_reads: int, psn: int) -> Address:
        return cls(port.link_layer, port.gid.kind, port.mtu, port.lid, log_reads, psn,
                   port.gid.raw)

    def pack(self) -> bytes:
        return _LAYOUT.pack(VERSION, self.link_layer, self.gid_kind, self.mtu, self.lid,
                            self.log_reads, 0, self.psn, self.gid)

    @classmethod
    def unpack(cls, raw: bytes) -> Address:
        """Raises HandleError for what no peer of this version sends."""
        if len(raw) != _LAYOUT.size:
            raise HandleError(f"an mlx5 address has {_LAYOUT.size} bytes, not {len(raw)}: is the "
                              "peer's HCA mlx5 too?")
        version, layer, kind, mtu, lid, log_reads, zero, psn, gid = _LAYOUT.unpack(raw)
        if version != VERSION:
            raise HandleError(f"mlx5 address of version {version}; this side speaks {VERSION}: "
                              "use the same expertwire release on both sides")
        if (layer not in (INFINIBAND, ETHERNET) or kind not in GID_NAMES or not 1 <= mtu <= 5
                or log_reads > 7 or zero or psn >> 24):
            raise HandleError(f"mlx5 address with impossible fields: {raw.hex()}")
        return cls(layer, kind, mtu, lid, log_reads, psn, gid)


def check_link(port: Port, peer: Address) -> None:
    """Raises LinkMismatch if packets from this port mean nothing at the peer's."""
    layers = {INFINIBAND: "InfiniBand", ETHERNET: "Ethernet"}
    if port.link_layer != peer.link_layer:
        raise LinkMismatch(
            f"this port is {layers[port.link_layer]}, the peer's {layers[peer.link_layer]}: name "
            "ports of one fabric (mlx5:<device>:<port>)"
        )
    if port.is_ethernet and port.gid.kind != peer.gid_kind:
        raise LinkMismatch(
            f"this side uses {GID_NAMES[port.gid.kind]} (GID {port.gid}), the peer "
            f"{GID_NAMES[peer.gid_kind]}: set EXPERTWIRE_MLX5_GID_INDEX on one of them "
            "(`show_gids`, or /sys/class/infiniband/*/ports/*/gid_attrs/types)"
        )
