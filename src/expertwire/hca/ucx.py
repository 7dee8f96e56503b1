"""The software HCA with its wire over UCX (native/wire*.cpp): peers on other hosts, any fabric that
the installed UCX knows. docs/ucx.md says how."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_uint32, c_uint64, c_void_p
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

from .._native import declare
from ..control.handles import WireHandle
from ..errors import ConfigError, HcaError
from .soft import FaultPlan, SoftHca, SoftPeer, SoftWindow, _check, _Handle

ACK_TIMEOUT = 5.0  # seconds without an acknowledgement until a peer counts as lost
LIBRARY = "libucp.so.0"


@functools.cache
def _wire_calls() -> SimpleNamespace:
    p, u32, u64 = c_void_p, c_uint32, c_uint64
    return SimpleNamespace(
        open=declare("ew_wire_open", c_int, u32, c_char_p, u64, POINTER(p)),
        address=declare("ew_wire_address", c_int, p, p, u32),
        window_id=declare("ew_window_wire_id", u64, p),
        connect=declare("ew_wire_connect", c_int, p, p, p, u32, u64, POINTER(p)),
    )


def find_library() -> str:
    """Where UCX is: EXPERTWIRE_UCX_LIBRARY, the libucx wheel, or the system's by its bare name."""
    named = os.environ.get("EXPERTWIRE_UCX_LIBRARY")
    if named:
        return named
    spec = importlib.util.find_spec("libucx")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "lib" / LIBRARY
        if path.is_file():
            return str(path)
    return LIBRARY


# UCX's settings are its environment variables, which it reads when it is opened. These are ours
# unless the user has set them.
SETTINGS = {
    "UCX_LOG_LEVEL": "fatal",  # its warnings about peers that go; our errors say more
    # A whole frame in one buffer: with the usual 8 KB a long message takes twice the time.
    "UCX_TCP_TX_SEG_SIZE": "320k",
    "UCX_TCP_RX_SEG_SIZE": "320k",
}


def set_defaults() -> None:
    """SETTINGS, for what the user has not set. To be called before UCX is loaded: it reads some of
    them then, and warns on stdout about those that came later."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


class UcxWindow(SoftWindow):
    """The keys that one peer gets. `handle` travels to that peer, no descriptor does."""

    @property
    def wire(self) -> WireHandle:
        wire_id = _wire_calls().window_id(self.handle)
        return WireHandle(wire_id, self._hca.wire_address)

    def __init__(self, hca: UcxHca):
        super().__init__(hca)
        self._hca = hca
        self.wire  # noqa: B018 - registers it: frames may name it from now on


class UcxPeer(SoftPeer):
    """A peer on another host."""

    def __init__(self, hca: UcxHca, window: UcxWindow, wire: WireHandle):
        _Handle.__init__(self)
        self._call = hca._call
        address = ctypes.create_string_buffer(wire.address, len(wire.address))
        _check(
            _wire_calls().connect(
                hca.handle, window.handle, address, len(wire.address), wire.window_id,
                byref(self._pointer),
            ), "connecting through UCX",
        )


class UcxHca(SoftHca):
    """A software HCA whose peers are reached through UCX.

    thread, spin: as for SoftHca. ack_timeout: seconds after which a peer that acknowledges nothing
    is lost (0x15). Raises HcaError when UCX is not there or has no transport.
    """

    network, scheme = True, "ucx"

    def __init__(
        self, *, thread: bool = True, spin: bool = False, ack_timeout: float = ACK_TIMEOUT
    ):
        if not 0 < ack_timeout <= 3600:
            raise ConfigError(f"ack_timeout must be from 0 to 3600 s, not {ack_timeout!r}")
        set_defaults()
        self._ack_timeout = ack_timeout
        super().__init__(thread=thread, spin=spin)
        length = _wire_calls().address(self.handle, None, 0)
        raw = ctypes.create_string_buffer(length)
        _wire_calls().address(self.handle, raw, length)
        self.wire_address = raw.raw

    def _open(self, flags: int) -> None:
        library = find_library()
        code = _wire_calls().open(
            flags, library.encode(), int(self._ack_timeout * 1e9), byref(self._pointer)
        )
        if code < 0 and library == LIBRARY:
            from ..launch import last_error

            raise HcaError(
                f"UCX is not there ({last_error()}): pip install 'expertwire[ucx]', or install "
                "your distribution's libucx0"
            )
        _check(code, "opening UCX")

    def create_window(self) -> UcxWindow:
        return UcxWindow(self)

    def connect_peer(self, window: UcxWindow, wire: WireHandle) -> UcxPeer:
        """The peer that a wire handle describes; what it writes goes to `window`."""
        return UcxPeer(self, window, wire)

    def import_peer(self, window_fd: int, wake_fd: int, region_fds: Sequence[int]) -> NoReturn:
        raise HcaError("a peer behind UCX has no descriptors: use connect_peer")

    def set_faults(self, plan: FaultPlan | None) -> None:
        if plan is not None:
            raise HcaError("faults of the path are the software HCA's; over UCX use tc netem")
