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
from ..control.handles import SECRET_BYTES, WireHandle
from ..errors import ConfigError, HcaError
from .soft import FaultPlan, SoftHca, SoftPeer, SoftWindow, _check, _Handle

ACK_TIMEOUT = 5.0  # seconds without an acknowledgement until a peer counts as lost
LIBRARY = "libucp.so.0"
MIN_LIMIT = 1 << 20  # some frames of 256 KiB
MAX_PEER_BYTES, MAX_HELD_BYTES = 64 << 20, 1 << 30  # for one peer, for all of them together


@functools.cache
def _wire_calls() -> SimpleNamespace:
    p, u32, u64 = c_void_p, c_uint32, c_uint64
    return SimpleNamespace(
        open=declare("ew_wire_open", c_int, u32, c_char_p, c_char_p, u64, u64, u64, POINTER(p)),
        address=declare("ew_wire_address", c_int, p, p, u32),
        window_id=declare("ew_window_wire_id", u64, p, p),
        connect=declare("ew_wire_connect", c_int, p, p, p, u32, u64, c_char_p, POINTER(p)),
        counters=declare("ew_wire_counters", None, p, p),
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


def _limit(variable: str, given: int | None, default: int) -> int:
    """A number of bytes: as given, else the variable's, else the default. Raises ConfigError."""
    text = os.environ.get(variable, "") if given is None else str(given)
    if not text:
        return default
    if not (text.isdecimal() and MIN_LIMIT <= int(text) < 1 << 63):
        raise ConfigError(f"{variable} is a number of bytes from {MIN_LIMIT} on, not {text!r}")
    return int(text)


class UcxWindow(SoftWindow):
    """The keys that one peer gets. `handle` travels to that peer, no descriptor does."""

    @property
    def wire(self) -> WireHandle:
        secret = ctypes.create_string_buffer(SECRET_BYTES)
        wire_id = _wire_calls().window_id(self.handle, secret)
        return WireHandle(wire_id, self._hca.wire_address, secret.raw)

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
                wire.secret, byref(self._pointer),
            ), "connecting through UCX",
        )


class UcxHca(SoftHca):
    """A software HCA whose peers are reached through UCX.

    thread, spin: as for SoftHca. ack_timeout: seconds after which a peer that acknowledges nothing
    is lost (0x15). local_address: an IP address of this host, whose network device UCX is to use,
    and to listen on, alone; "": those that UCX chooses. UCX_NET_DEVICES, where it is set, goes
    before that. max_peer_bytes, max_held_bytes: how much one peer, and all of them, can make this
    side hold (docs/ucx.md); None: as EXPERTWIRE_UCX_PEER_BYTES and EXPERTWIRE_UCX_HELD_BYTES say,
    or 64 MiB and 1 GiB.

    Raises HcaError when UCX is not there or has no transport, ConfigError for options that make no
    sense.
    """

    network, scheme = True, "ucx"

    def __init__(
        self, *, thread: bool = True, spin: bool = False, ack_timeout: float = ACK_TIMEOUT,
        local_address: str = "", max_peer_bytes: int | None = None,
        max_held_bytes: int | None = None,
    ):
        if not 0 < ack_timeout <= 3600:
            raise ConfigError(f"ack_timeout must be from 0 to 3600 s, not {ack_timeout!r}")
        self._max_peer_bytes = _limit("EXPERTWIRE_UCX_PEER_BYTES", max_peer_bytes, MAX_PEER_BYTES)
        self._max_held_bytes = _limit("EXPERTWIRE_UCX_HELD_BYTES", max_held_bytes, MAX_HELD_BYTES)
        self._local_address = "" if os.environ.get("UCX_NET_DEVICES") else local_address
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
            flags, library.encode(), self._local_address.encode(), int(self._ack_timeout * 1e9),
            self._max_peer_bytes, self._max_held_bytes, byref(self._pointer),
        )
        if code < 0 and library == LIBRARY:
            from ..launch import last_error

            raise HcaError(
                f"UCX is not there ({last_error()}): pip install 'expertwire[ucx]', or install "
                "your distribution's libucx0"
            )
        _check(code, "opening UCX")

    def stats(self) -> dict:
        """As of the software HCA, and: frames refused (damaged, or without the secret of a
        connection), peers cut off because of the limits, bytes held for peers, now and at most,
        frames that UCX has not sent yet."""
        counters = (c_uint64 * 5)()
        _wire_calls().counters(self.handle, counters)
        names = ("refused_frames", "peers_cut_off", "held_bytes", "most_held_bytes",
                 "frames_under_way")
        return {**super().stats(), **dict(zip(names, counters, strict=True))}

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
