"""Traces: what every process did when, on one clock, as a file for Perfetto or chrome://tracing.

    EXPERTWIRE_TRACE=trace.json        # of clients and servers alike: they write one trace together

    with trace.tracing("trace.json"):  # or from a program
        with trace.span("attention"):
            ...

Each process writes records into a mapped file of its own in `trace.json.parts/`; what was written
before a kill -9 stays there. The last process that ends makes trace.json of them; while some still
run, or when the last one was killed, `expertwire trace merge` does.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator
from ctypes import c_char_p, c_int, c_uint64
from pathlib import Path

from .._native import declare
from ..errors import ConfigError
from ..launch import last_error
from .file import (
    FACTS_AT,
    HEADER_BYTES,
    KIND_SPAN,
    RECORD_BYTES,
    STAGES,
    Record,
    make_header,
    pack_stage,
    parts_folder,
)

DEFAULT_RECORDS = 1 << 18  # per process, the last ones: 40 MB, thousands of layers
LOCK_NAME = "lock"

_lock = threading.RLock()
_part: _Part | None = None
active = False  # read on the hot path
_collectors: list[weakref.WeakMethod] = []


class _Part:
    """The file that this process writes its records to. Locked as long as the process lives."""

    def __init__(self, path: Path, num_records: int):
        self.trace_path = path
        self.names: list[str] = []
        self.add = declare("ew_trace_add", None, c_char_p)
        folder = parts_folder(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder):
                if not live_parts(folder):
                    for old in folder.glob("*.part"):  # of a trace that ended
                        old.unlink()
                self.path = folder / f"{os.getpid()}-{time.monotonic_ns()}.part"
                self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC,
                                  0o600)
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            raise ConfigError(
                f"the trace {path} cannot be written: {err}; choose another file"
            ) from err
        self.num_bytes = HEADER_BYTES + num_records * RECORD_BYTES
        os.ftruncate(self.fd, self.num_bytes)  # sparse: only what is written takes room
        os.pwrite(self.fd, make_header(num_records), 0)
        if declare("ew_trace_open", c_int, c_int, c_uint64)(self.fd, self.num_bytes) < 0:
            os.close(self.fd)
            self.path.unlink()
            raise ConfigError(f"tracing failed: {last_error()}")

    def add_name(self, name: str) -> None:
        if name not in self.names:
            self.names.append(name)
            os.pwrite(self.fd, make_header(None, ", ".join(self.names)), FACTS_AT)

    def close(self) -> bool:
        """Ends it; True if no other process writes to this trace any more."""
        declare("ew_trace_close", None, c_uint64)(self.num_bytes)
        count = int.from_bytes(os.pread(self.fd, 8, 8), "little")
        used = HEADER_BYTES + min(count * RECORD_BYTES, self.num_bytes - HEADER_BYTES)
        os.ftruncate(self.fd, used)
        os.close(self.fd)
        return not live_parts(self.path.parent)


@contextlib.contextmanager
def locked(folder: Path) -> Generator[None, None, None]:
    """One process at a time looks at who is there, begins, or merges."""
    fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def live_parts(folder: Path) -> list[Path]:
    """Parts that a process still writes to."""
    alive = []
    for part in folder.glob("*.part"):
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                alive.append(part)
            finally:
                os.close(fd)
    return alive


def start(path: str | Path, *, name: str = "", num_records: int | None = None) -> None:
    """Begins to record what this process does, for the trace at `path`.

    name: of this process in the trace. num_records: how many are kept, the last ones; default
    EXPERTWIRE_TRACE_RECORDS or 262144. Raises ConfigError if it records already, or the file
    cannot be written.
    """
    global _part, active
    with _lock:
        if _part is not None:
            raise ConfigError(f"this process already writes the trace {_part.trace_path}")
        _part = _Part(Path(path).absolute(), num_records or records_wanted())
        active = True
        atexit.register(stop)
        if name:
            _part.add_name(name)


def before_stop(collect: Callable[[], object]) -> None:
    """Calls `collect` (a bound method of what may be gone by then) before the recording ends."""
    _collectors.append(weakref.WeakMethod(collect))


def stop() -> Path | None:
    """Ends the recording; the last process of a trace merges it. The trace's path, if it did."""
    global _part, active
    with _lock:
        while _part is not None and _collectors:
            if (collect := _collectors.pop()()) is not None:
                collect()
        part, _part, active = _part, None, False
        if part is None:
            return None
        atexit.unregister(stop)
        if not part.close():
            return None
        from .chrome import merge

        return merge(part.trace_path)


@contextlib.contextmanager
def tracing(path: str | Path, *, name: str = "") -> Generator[None, None, None]:
    """Records within the block; arguments as for `start`."""
    start(path, name=name)
    try:
        yield
    finally:
        stop()


def join(name: str) -> None:
    """A client or server is made: begins what EXPERTWIRE_TRACE asks for, and names this process."""
    path = os.environ.get("EXPERTWIRE_TRACE")
    with _lock:
        if _part is None and path:
            start(path)
        if _part is not None:
            _part.add_name(name)


def records_wanted() -> int:
    text = os.environ.get("EXPERTWIRE_TRACE_RECORDS", str(DEFAULT_RECORDS))
    if not text.isdigit() or not 1 <= int(text) <= 1 << 28:
        raise ConfigError(f"EXPERTWIRE_TRACE_RECORDS must be a number from 1 to {1 << 28}, "
                          f"not {text!r}")
    return int(text)


@contextlib.contextmanager
def span(name: str) -> Generator[None, None, None]:
    """A span of the caller's own, e.g. "attention"; up to 64 bytes of name are kept."""
    begin = time.perf_counter_ns()
    try:
        yield
    finally:
        if active:
            text = name.encode()[:64].decode(errors="ignore").encode()  # cut between letters
            add(Record(kind=KIND_SPAN, begin_ns=begin, end_ns=time.perf_counter_ns(), wqe=text))


def stage(
    name: str, begin_ns: int, end_ns: int, *, layer: int = 0, client: int = 0, server: int = 0,
    rows: int = 0, seq: int = 0,
) -> None:
    """A stage that Python ran, while `active`. Times as perf_counter_ns: CLOCK_MONOTONIC."""
    _add(pack_stage(STAGES.index(name), begin_ns, end_ns, layer, client, server, rows,
                    seq))


def add(record: Record) -> None:
    """Records something; its number and thread are filled in."""
    _add(bytes(record))


def _add(record: bytes) -> None:
    if _part is not None:
        _part.add(record)
