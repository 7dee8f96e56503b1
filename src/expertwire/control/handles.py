"""Connection and memory handles: small versioned byte strings that two peers exchange.

Layout (little-endian): 4 bytes magic | u16 version | u16 body length | body | u32 CRC-32 of all
before it. A handle that is truncated, damaged, or of another version is refused (HandleError).
On one host they carry no secret that helps without the file descriptors that travel beside them; a
wire handle carries the secret of its connection.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from ..errors import HandleError

HANDLE_VERSION = 2
MAX_QPNS = 0xFFFF // 4  # the length of a body is 16 bits
MAX_WIRE_ADDRESS = 16384  # UCX's grow with the number of network devices; 100 bytes is usual
SECRET_BYTES = 16
_PREFIX = struct.Struct("<4sHH")


def _fields(layout: str, *values: int) -> bytes:
    try:
        return struct.pack(layout, *values)
    except struct.error as err:
        raise HandleError(f"numbers that cannot be packed in a handle: {err}") from None


def _seal(magic: bytes, body: bytes) -> bytes:
    head = _PREFIX.pack(magic, HANDLE_VERSION, len(body)) + body
    return head + struct.pack("<I", zlib.crc32(head))


def _open(magic: bytes, raw: bytes, what: str) -> bytes:
    if len(raw) < _PREFIX.size + 4:
        raise HandleError(f"{what} handle is truncated: {len(raw)} bytes")
    found, version, length = _PREFIX.unpack_from(raw)
    if found != magic:
        raise HandleError(f"not a {what} handle: it begins with {found!r}, expected {magic!r}")
    if version != HANDLE_VERSION:
        raise HandleError(
            f"{what} handle of version {version}; this side speaks version {HANDLE_VERSION}: "
            "use the same expertwire release on both sides"
        )
    if len(raw) != _PREFIX.size + length + 4:
        raise HandleError(f"{what} handle has {len(raw)} bytes, its head says {length} of body")
    (checksum,) = struct.unpack("<I", raw[-4:])
    if checksum != zlib.crc32(raw[:-4]):
        raise HandleError(f"{what} handle is damaged: its checksum does not match")
    return raw[_PREFIX.size : -4]


@dataclass(frozen=True)
class ConnectionHandle:
    """Where a peer's queue pairs are: their numbers, in the order both sides pair them up."""

    qpns: tuple[int, ...]
    MAGIC = b"EWCH"

    def pack(self) -> bytes:
        """Raises HandleError for numbers that no peer would take."""
        if not 0 < len(self.qpns) <= MAX_QPNS:
            raise HandleError(
                f"{len(self.qpns)} queue pairs cannot be packed in a handle (1 to {MAX_QPNS})"
            )
        return _seal(self.MAGIC, _fields(f"<{len(self.qpns)}I", *self.qpns))

    @classmethod
    def unpack(cls, raw: bytes) -> ConnectionHandle:
        body = _open(cls.MAGIC, raw, "connection")
        if len(body) % 4 or not body:
            raise HandleError(f"connection handle with a body of {len(body)} bytes")
        return cls(struct.unpack(f"<{len(body) // 4}I", body))


@dataclass(frozen=True)
class MemoryHandle:
    """A region the peer may write: its address there, its size in bytes, and the key for it."""

    addr: int
    num_bytes: int
    rkey: int
    fd_idx: int
    MAGIC = b"EWMH"
    _BODY = struct.Struct("<QQII")

    def pack(self) -> bytes:
        """Raises HandleError for an address range that no peer would take."""
        if self.num_bytes <= 0 or self.addr + self.num_bytes > 1 << 64:
            raise HandleError(
                f"{self.num_bytes} bytes at {self.addr:#x} cannot be packed in a handle"
            )
        return _seal(self.MAGIC, _fields(
            self._BODY.format, self.addr, self.num_bytes, self.rkey, self.fd_idx
        ))

    @classmethod
    def unpack(cls, raw: bytes) -> MemoryHandle:
        body = _open(cls.MAGIC, raw, "memory")
        if len(body) != cls._BODY.size:
            raise HandleError(f"memory handle with a body of {len(body)} bytes")
        handle = cls(*cls._BODY.unpack(body))
        if handle.num_bytes == 0 or handle.addr + handle.num_bytes > 1 << 64:
            raise HandleError("memory handle with an impossible address range")
        return handle


@dataclass(frozen=True)
class WireHandle:
    """How a peer on another host is reached: the number of its window, its UCX address, and the
    secret that the window asks for in every frame (UCX only: zeros elsewhere)."""

    window_id: int
    address: bytes
    secret: bytes = bytes(SECRET_BYTES)
    MAGIC = b"EWNH"
    _HEAD = struct.Struct(f"<Q{SECRET_BYTES}s")

    def pack(self) -> bytes:
        """Raises HandleError for what no peer would take."""
        if not 0 < len(self.address) <= MAX_WIRE_ADDRESS:
            raise HandleError(f"a UCX address of {len(self.address)} bytes cannot be packed")
        if len(self.secret) != SECRET_BYTES:
            raise HandleError(f"a secret has {SECRET_BYTES} bytes, not {len(self.secret)}")
        try:
            head = self._HEAD.pack(self.window_id, self.secret)
        except struct.error as err:
            raise HandleError(f"a window number that cannot be packed: {err}") from None
        return _seal(self.MAGIC, head + self.address)

    @classmethod
    def unpack(cls, raw: bytes) -> WireHandle:
        body = _open(cls.MAGIC, raw, "wire")
        if not 0 < len(body) - cls._HEAD.size <= MAX_WIRE_ADDRESS:
            raise HandleError(f"wire handle with a body of {len(body)} bytes")
        window_id, secret = cls._HEAD.unpack_from(body)
        if window_id == 0:
            raise HandleError("wire handle without a window")
        return cls(window_id, body[cls._HEAD.size :], secret)
