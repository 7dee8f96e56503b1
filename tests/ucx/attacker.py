"""Somebody who speaks UCX and the frames of native/wire.hpp, but not the protocol."""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Callable

from expertwire.control.handles import WireHandle
from expertwire.hca.ucx import find_library, set_defaults

FEATURE_AM, SERIALIZED, MODE_PEER, CLOSE_FORCE, SEND_EAGER = 1 << 6, 1, 1, 1, 2
SET_FLAGS = 1 << 4  # of a request's parameters
QPN = 0x77
NOP, WRITE, READ = 0x00, 0x08, 0x10


def op(opcode: int, *, num_bytes: int = 0, total: int = 0, addr: int = 0, rkey: int = 0) -> bytes:
    """An entry of one block, whole."""
    return struct.pack("<BBBBIIIQQQ", opcode, 0, 1, 1, 0, rkey, num_bytes, addr,
                       total or num_bytes, 0)


def frame(
    wire: WireHandle, seq: int, *ops: bytes, secret: bytes | None = None, lead: int = 0,
    qpn: int = QPN,
) -> bytes:
    """The header of a request for the window; its data goes beside it. qpn: the sender's."""
    head = struct.pack(
        "<IBBBBQ16sIIIIQQQQ", 0x46575745, 2, 1, len(ops), 0, wire.window_id,
        wire.secret if secret is None else secret, 1, qpn, 0, lead, seq, 0, 0, 0,
    )
    return head + b"".join(ops)


class Attacker:
    """A UCX worker of its own, connected to whoever `wire` describes."""

    def __init__(self, wire: WireHandle):
        set_defaults()
        self._ucp = ctypes.CDLL(find_library())
        for name in ("ucp_am_send_nbx", "ucp_ep_close_nbx"):
            getattr(self._ucp, name).restype = ctypes.c_void_p
        for name in ("ucp_init_version", "ucp_worker_create", "ucp_ep_create",
                     "ucp_worker_get_address"):
            getattr(self._ucp, name).restype = ctypes.c_byte
        self._context, self._worker, self._ep = (ctypes.c_void_p() for _ in range(3))
        self._kept: list = []  # UCX reads from it later
        self._call("ucp_init_version", 1, 11, self._params("<QQ", 1, FEATURE_AM), None,
                   ctypes.byref(self._context))
        self._call("ucp_worker_create", self._context, self._params("<Qi", 1, SERIALIZED),
                   ctypes.byref(self._worker))
        place, length = ctypes.c_void_p(), ctypes.c_size_t()
        self._call("ucp_worker_get_address", self._worker, ctypes.byref(place),
                   ctypes.byref(length))
        self.address = ctypes.string_at(place.value, length.value)
        target = self._keep(wire.address)
        self._call("ucp_ep_create", self._worker,
                   self._params("<QQi", 3, ctypes.addressof(target), MODE_PEER),
                   ctypes.byref(self._ep))

    def _keep(self, raw: bytes) -> ctypes.Array:
        self._kept.append(ctypes.create_string_buffer(raw, max(1, len(raw))))
        return self._kept[-1]

    def _params(self, layout: str, *values: int) -> ctypes.Array:
        return self._keep(struct.pack(layout, *values).ljust(512, b"\0"))

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._ucp, name)(*args)
        assert status == 0, (name, status)

    @property
    def wire(self) -> WireHandle:
        """What its victim may connect to: nobody answers there."""
        return WireHandle(1, self.address)

    def send(self, header: bytes, data: bytes = b"") -> bool:
        """Hands a frame to UCX; whether it took it."""
        request = self._ucp.ucp_am_send_nbx(
            self._ep, 0, self._keep(header), ctypes.c_size_t(len(header)), self._keep(data),
            ctypes.c_size_t(len(data)), self._params("<II", SET_FLAGS, SEND_EAGER),
        )
        return request is None or request < (1 << 64) - 100

    def progress(self, until: Callable[[], bool], timeout: float = 20.0) -> None:
        """Lets UCX send and receive until something is so. What comes is thrown away."""
        end = time.monotonic() + timeout
        while not until():
            self._ucp.ucp_worker_progress(self._worker)
            assert time.monotonic() < end, "it did not come to that"

    def close(self) -> None:
        request = self._ucp.ucp_ep_close_nbx(self._ep, self._params("<II", SET_FLAGS, CLOSE_FORCE))
        for _ in range(1000):
            self._ucp.ucp_worker_progress(self._worker)
        if request is not None and request < (1 << 64) - 100:
            self._ucp.ucp_request_free(ctypes.c_void_p(request))
        self._ucp.ucp_worker_destroy(self._worker)
        self._ucp.ucp_cleanup(self._context)
