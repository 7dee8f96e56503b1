"""Who rings: device code itself, or a thread here for kernels that cannot reach the register."""

from __future__ import annotations

import functools
from ctypes import POINTER, byref, c_int, c_uint32, c_uint64, c_void_p
from types import SimpleNamespace

from ..._native import declare
from ...errors import HcaError


@functools.cache
def _calls() -> SimpleNamespace:
    p, u32, u64 = c_void_p, c_uint32, c_uint64
    return SimpleNamespace(
        create=declare("ew_doorbells_create", p),
        add=declare("ew_doorbells_add", u64, p),
        serve=declare("ew_doorbells_serve", c_int, p, u64, u64, u32),
        remove=declare("ew_doorbells_remove", None, p, u64),
        rung=declare("ew_doorbells_rung", u64, p),
        words=declare("ew_doorbells_words", u64, p, POINTER(u64)),
        destroy=declare("ew_doorbells_destroy", None, p),
        polled=declare("ew_hca_set_polled", None, p, u32),
    )


def set_polled(context: int) -> None:
    """Waits of a software HCA's context never sleep for long: an adapter wakes nobody."""
    _calls().polled(context, 1)


class Doorbells:
    """A thread that rings (native/doorbell.cpp). Device code uses DoorbellMode::kDoorbellProxy."""

    def __init__(self) -> None:
        self._call = _calls()
        self._pointer = self._call.create()

    def add(self) -> int:
        """Address of a new word for a producer index. Raises HcaError if there are too many."""
        addr = self._call.add(self._pointer)
        if not addr:
            raise HcaError("more than 1024 queue pairs with doorbell=\"proxy\"")
        return addr

    def serve(self, index_addr: int, register_addr: int, qpn: int) -> None:
        """From now on what is written to the word goes to the register."""
        if self._call.serve(self._pointer, index_addr, register_addr, qpn) < 0:
            raise HcaError(f"no doorbell word at {index_addr:#x}")

    def remove(self, index_addr: int) -> None:
        """The register is not touched any more once this returns."""
        self._call.remove(self._pointer, index_addr)

    @property
    def num_rung(self) -> int:
        return self._call.rung(self._pointer)

    @property
    def words(self) -> tuple[int, int]:
        """(address, bytes) of all words, to be mapped to a GPU."""
        num_bytes = c_uint64()
        return self._call.words(self._pointer, byref(num_bytes)), num_bytes.value

    def close(self) -> None:
        """Stops the thread. Idempotent."""
        if self._pointer:
            self._call.destroy(self._pointer)
            self._pointer = None
