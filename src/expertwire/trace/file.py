"""The records of one process, as native/trace.hpp lays them out."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import socket
import struct
import sys
import time
from ctypes import c_uint8, c_uint32, c_uint64
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import ConfigError

MAGIC = 0x3145434152545745
HEADER_BYTES, FACTS_AT = 4096, 64
WQE_BYTES = 64
STAGES = ("other", "route", "pack", "put", "wait", "combine", "poll", "gather", "experts", "reply",
          "moe", "send")
(KIND_STAGE, KIND_MESSAGE, KIND_POSTED, KIND_EXECUTED, KIND_ARRIVED, KIND_TAKEN, KIND_REPLIED,
 KIND_SPAN, KIND_DEVICE, KIND_ACKNOWLEDGED) = range(1, 11)


class Record(ctypes.Structure):
    """ew::TraceRecord; times in ns of CLOCK_MONOTONIC."""

    _fields_ = (
        ("number", c_uint64), ("begin_ns", c_uint64), ("end_ns", c_uint64), ("kind", c_uint32),
        ("thread", c_uint32), ("stage", c_uint32), ("layer", c_uint32), ("client", c_uint32),
        ("server", c_uint32), ("seq", c_uint64), ("hca", c_uint64), ("qpn", c_uint32),
        ("rows", c_uint32), ("idx", c_uint64), ("num_bytes", c_uint64), ("syndrome", c_uint32),
        ("reason", c_uint32), ("wqe", c_uint8 * WQE_BYTES),
    )

    def __init__(self, *, wqe: bytes = b"", **fields: int):
        super().__init__(**fields)
        ctypes.memmove(self.wqe, wqe, min(len(wqe), WQE_BYTES))


RECORD_BYTES = ctypes.sizeof(Record)
_PACKED = struct.Struct("<3Q6I2Q2I2Q2I64s")  # the same in one go: four times as quick
RECORD_DTYPE = np.dtype([
    (name, (np.uint8, WQE_BYTES) if name == "wqe" else np.dtype(kind))
    for name, kind in ((field[0], field[1]) for field in Record._fields_)
])


def pack_stage(
    stage: int, begin_ns: int, end_ns: int, layer: int, client: int, server: int, rows: int,
    seq: int,
) -> bytes:
    """A Record of kind KIND_STAGE."""
    return _PACKED.pack(0, begin_ns, end_ns, KIND_STAGE, 0, stage, layer, client, server, seq, 0,
                        0, rows, 0, 0, 0, 0, b"")


@dataclass(frozen=True)
class Part:
    """One process's records, in the order in which they were written."""

    file: str
    pid: int
    name: str
    boot: str  # processes with the same boot share CLOCK_MONOTONIC
    realtime_offset_ns: int  # to be added to CLOCK_MONOTONIC for the time of day
    num_lost: int  # older records that later ones took the place of
    records: np.ndarray  # [N] of RECORD_DTYPE


def parts_folder(path: Path) -> Path:
    return path.with_name(path.name + ".parts")


def boot_id() -> str:
    """Tells hosts, and their boots, apart."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        text = socket.gethostname()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_header(num_records: int | None, name: str = "") -> bytes:
    """The beginning of a part: a full header, or (None) without the native part's counters."""
    facts = json.dumps({
        "name": (name or Path(sys.argv[0] or "python").name)[:400], "boot": boot_id(),
        "realtime_offset_ns": time.time_ns() - time.monotonic_ns(),
    }).encode()[: HEADER_BYTES - FACTS_AT]
    text = facts.ljust(HEADER_BYTES - FACTS_AT, b"\0")
    if num_records is None:
        return text
    counters = b"".join(n.to_bytes(8, "little") for n in (MAGIC, 0, num_records, os.getpid()))
    return counters.ljust(FACTS_AT, b"\0") + text


def read_part(path: Path) -> Part:
    """Reads one part, also while it is being written. Raises ConfigError if it is none."""
    with path.open("rb") as file:
        raw = file.read(HEADER_BYTES)
        head = [int.from_bytes(raw[8 * i : 8 * i + 8], "little") for i in range(4)]
        if len(raw) < HEADER_BYTES or head[0] != MAGIC or not head[2]:
            raise ConfigError(f"{path} is no part of a trace")
        _, count, capacity, pid = head
        raw += file.read(min(count, capacity) * RECORD_BYTES)
    try:
        facts = json.loads(raw[FACTS_AT:HEADER_BYTES].rstrip(b"\0"))
    except ValueError as err:
        raise ConfigError(f"{path}: the header of this part of a trace is damaged") from err
    num_kept = min((len(raw) - HEADER_BYTES) // RECORD_BYTES, capacity)
    records: np.ndarray = np.frombuffer(raw, RECORD_DTYPE, num_kept, HEADER_BYTES)
    # A record whose number is not its place's was being written when its process was killed.
    place = np.arange(num_kept, dtype=np.uint64)
    numbers = records["number"]
    whole = (numbers > 0) & ((numbers - np.uint64(1)) % np.uint64(capacity) == place)
    records = records[whole]
    records = records[np.argsort(records["number"])]
    return Part(
        file=path.name, pid=pid, name=str(facts["name"]), boot=str(facts["boot"]),
        realtime_offset_ns=int(facts["realtime_offset_ns"]), num_lost=max(0, count - capacity),
        records=records,
    )
