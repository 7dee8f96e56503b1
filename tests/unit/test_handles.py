"""Handles: what is packed comes back, and anything else is refused."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertwire.control.handles import (
    HANDLE_VERSION,
    MAX_WIRE_ADDRESS,
    SECRET_BYTES,
    ConnectionHandle,
    MemoryHandle,
    WireHandle,
)
from expertwire.errors import HandleError

CONNECTION = ConnectionHandle((1, 0xFFFFFF, 77))
MEMORY = MemoryHandle(addr=0x7F0000001000, num_bytes=1 << 20, rkey=0xDEADBEEF, fd_idx=2)
WIRE = WireHandle((1 << 64) - 1, b"\0where\0", b"\0" + bytes(range(240, 255)))
HANDLES = [CONNECTION, MEMORY, WIRE]
NAMES = ["connection", "memory", "wire"]

U32 = st.integers(0, (1 << 32) - 1)


def sealed(magic: bytes, body: bytes, version: int = HANDLE_VERSION) -> bytes:
    """A handle with a right checksum, whatever its content."""
    head = struct.pack("<4sHH", magic, version, len(body)) + body
    return head + struct.pack("<I", zlib.crc32(head))


@given(st.lists(U32, min_size=1, max_size=300))
def test_connection_round_trip(qpns):
    handle = ConnectionHandle(tuple(qpns))
    assert ConnectionHandle.unpack(handle.pack()) == handle


@given(st.integers(0, (1 << 64) - 2), st.data(), U32, U32)
def test_memory_round_trip(addr, data, rkey, fd_idx):
    num_bytes = data.draw(st.integers(1, min((1 << 64) - addr, (1 << 64) - 1)))
    handle = MemoryHandle(addr, num_bytes, rkey, fd_idx)
    assert MemoryHandle.unpack(handle.pack()) == handle


@given(st.integers(1, (1 << 64) - 1), st.binary(min_size=1, max_size=MAX_WIRE_ADDRESS),
       st.binary(min_size=SECRET_BYTES, max_size=SECRET_BYTES))
def test_wire_round_trip(window_id, address, secret):
    handle = WireHandle(window_id, address, secret)
    assert WireHandle.unpack(handle.pack()) == handle


@pytest.mark.parametrize("handle", [
    WireHandle(1, b""), WireHandle(1, bytes(MAX_WIRE_ADDRESS + 1)), WireHandle(-1, b"x"),
    WireHandle(1 << 64, b"x"), WireHandle(1, b"x", b"short"), WireHandle(1, b"x", bytes(17)),
], ids=lambda handle: repr(handle)[:40])
def test_wire_handles_that_no_peer_would_take_are_not_packed(handle):
    with pytest.raises(HandleError):
        handle.pack()


@pytest.mark.parametrize("body", [
    b"", bytes(8), bytes(8 + SECRET_BYTES), bytes(8 + SECRET_BYTES + 1),  # no window
    b"\1" + bytes(7 + SECRET_BYTES + MAX_WIRE_ADDRESS + 1),
], ids=len)
def test_wire_bodies_that_do_not_fit_are_refused(body):
    with pytest.raises(HandleError):
        WireHandle.unpack(sealed(WireHandle.MAGIC, body))


@given(st.binary(max_size=64))
def test_arbitrary_bytes_never_give_anything_but_handle_error(raw):
    for kind in (ConnectionHandle, MemoryHandle, WireHandle):
        with pytest.raises(HandleError):
            kind.unpack(raw)


@pytest.mark.parametrize("handle", HANDLES, ids=NAMES)
def test_every_single_byte_damage_is_refused(handle):
    raw = handle.pack()
    for at in range(len(raw)):
        for flip in range(1, 256):
            damaged = bytearray(raw)
            damaged[at] ^= flip
            with pytest.raises(HandleError):
                type(handle).unpack(bytes(damaged))


@pytest.mark.parametrize("handle", HANDLES, ids=NAMES)
def test_every_truncation_and_extension_is_refused(handle):
    raw = handle.pack()
    for length in range(len(raw)):
        with pytest.raises(HandleError):
            type(handle).unpack(raw[:length])
    with pytest.raises(HandleError):
        type(handle).unpack(raw + b"\0")


@pytest.mark.parametrize("version", [0, HANDLE_VERSION + 1, 0xFFFF])
@pytest.mark.parametrize("handle", HANDLES, ids=NAMES)
def test_another_version_is_refused_by_name(handle, version):
    body = handle.pack()[8:-4]
    expected = f"version {version}; this side speaks version {HANDLE_VERSION}"
    with pytest.raises(HandleError, match=expected):
        type(handle).unpack(sealed(handle.MAGIC, body, version))


def test_one_kind_is_not_taken_for_the_other():
    with pytest.raises(HandleError, match="not a memory handle"):
        MemoryHandle.unpack(CONNECTION.pack())
    with pytest.raises(HandleError, match="not a connection handle"):
        ConnectionHandle.unpack(MEMORY.pack())


@pytest.mark.parametrize("body", [b"", b"\0", b"\0" * 5])
def test_a_connection_body_that_is_not_words_is_refused(body):
    with pytest.raises(HandleError, match="body"):
        ConnectionHandle.unpack(sealed(b"EWCH", body))


@pytest.mark.parametrize("size", [0, 23, 25, 48])
def test_a_memory_body_of_another_size_is_refused(size):
    with pytest.raises(HandleError, match="body"):
        MemoryHandle.unpack(sealed(b"EWMH", bytes(size)))


@pytest.mark.parametrize(
    ("addr", "num_bytes"), [(0, 0), (0x1000, 0), ((1 << 64) - 8, 9), (2, (1 << 64) - 1)]
)
def test_an_impossible_range_is_refused(addr, num_bytes):
    body = struct.pack("<QQII", addr, num_bytes, 1, 0)
    with pytest.raises(HandleError, match="impossible address range"):
        MemoryHandle.unpack(sealed(b"EWMH", body))


@pytest.mark.parametrize(
    "handle",
    [
        ConnectionHandle(()),
        ConnectionHandle((1 << 32,)),
        ConnectionHandle((-1,)),
        ConnectionHandle(tuple(range(20_000))),
        MemoryHandle(-1, 1, 1, 0),
        MemoryHandle(0, 0, 1, 0),
        MemoryHandle(1 << 64, 1, 1, 0),
        MemoryHandle(0, 1, 1 << 32, 0),
    ],
    ids=lambda handle: repr(handle)[:40],
)
def test_what_no_peer_would_take_is_not_packed(handle):
    with pytest.raises(HandleError, match="cannot be packed"):
        handle.pack()
