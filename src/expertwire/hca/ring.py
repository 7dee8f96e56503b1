"""A send queue's ring in a file, and what is in it.

A dump is a line of JSON (queue number, size, indices, doorbell record, last completion) and then
the ring's bytes as they were; several dumps may follow each other in one file. Bytes without such
a line are taken as entries one after another.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import ConfigError
from .check import Verdict, check_entry, num_blocks
from .wqe import WQE_BYTES, Cqe, Wqe, syndrome_name

MAGIC = b'{"expertwire_ring": 1, '
MAX_HEAD_BYTES = 4096
MAX_WQE = 1 << 15
MAX_BLOCKS = 16  # of one entry: 63 segments


@dataclass(frozen=True)
class Ring:
    """blocks: the ring, slot by slot. written, rung, completed: running indices, each one past
    the last; `written` None: `blocks` are entries one after another and not a ring."""

    blocks: bytes
    qpn: int | None = None
    written: int | None = None
    rung: int | None = None
    completed: int | None = None
    doorbell_record: str = ""  # 8 bytes in hex
    cqe: str = ""  # the last completion, 64 bytes in hex
    name: str = ""

    @property
    def num_wqe(self) -> int:
        return len(self.blocks) // WQE_BYTES

    def completion(self) -> Cqe | None:
        """None if nothing was completed yet."""
        cqe = Cqe.decode(bytes.fromhex(self.cqe)) if self.cqe else None
        return None if cqe is None or cqe.opcode == 15 else cqe


@dataclass(frozen=True)
class Entry:
    """One entry: its running index, its bytes, what they mean (None: no entry), and its faults."""

    index: int
    raw: bytes
    wqe: Wqe | None
    verdict: Verdict
    is_rung: bool

    def as_dict(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"index": self.index, "rung": self.is_rung, **asdict(self.verdict)}
        wqe = self.wqe
        if wqe is None:
            return {**facts, "raw": self.raw.hex()}
        return {
            **facts, "opcode": wqe.name, "qpn": wqe.qpn, "ds": wqe.num_segments,
            "raddr": wqe.raddr, "rkey": wqe.rkey, "bytes": num_data_bytes(wqe),
            "data": [asdict(s) for s in wqe.data],
            "inline": None if wqe.inline is None else wqe.inline.hex(),
            "atomic": wqe.atomic.hex(), "opmod": wqe.opmod, "imm": wqe.imm,
        }


def num_data_bytes(wqe: Wqe) -> int:
    return sum(s.num_bytes for s in wqe.data) + len(wqe.inline or b"")


# -------------------------------------------------------------------- files


def write_ring(
    out: BinaryIO, qp: Any, name: str = "", read: Callable[[int, int], bytes] = ctypes.string_at
) -> None:
    """Appends a dump of a queue pair's ring, as it is now: racy while somebody posts.

    qp: its device state (device_structs.IbgdaQp) whose ring, record and completions
    `read(address, number of bytes)` reaches.
    """
    facts = {
        "expertwire_ring": 1, "name": name, "qpn": qp.qpn, "num_wqe": qp.num_wqe,
        "written": qp.ready_head, "rung": qp.prod_idx, "completed": qp.cons_idx,
        "doorbell_record": read(qp.dbrec_addr, 8).hex(),
        "cqe": read(qp.cq_addr, 64).hex(),
    }
    out.write(json.dumps(facts).encode() + b"\n")
    out.write(read(qp.sq_addr, qp.num_wqe * WQE_BYTES))


def read_rings(path: str | Path, *, index: int | None = None) -> list[Ring]:
    """All rings of a file. index: of the first entry, for bytes without a head.

    Raises ConfigError for a file that cannot be read, or is no dump.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as err:
        raise ConfigError(f"cannot read {path}: {err.strerror or err}") from None
    if not data.startswith(MAGIC):
        if not data or len(data) % 16:
            raise ConfigError(
                f"{path} has {len(data)} bytes: neither a dump (Endpoint.dump, EXPERTWIRE_DUMP) "
                "nor entries, which are multiples of 16 bytes"
            )
        first = struct.unpack_from(">I", data)[0] >> 8 & 0xFFFF if index is None else index
        data = data.ljust(-(-len(data) // WQE_BYTES) * WQE_BYTES, b"\0")
        return [Ring(data, completed=first, name="bytes")]
    rings = []
    while data:
        ring, data = _take_ring(data, path, len(rings) + 1)
        rings.append(ring)
    return rings


def _take_ring(data: bytes, path: str | Path, number: int) -> tuple[Ring, bytes]:
    head, newline, rest = data.partition(b"\n")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        facts = json.loads(head) if data.startswith(MAGIC) and len(head) <= MAX_HEAD_BYTES else {}
        size = int(facts["num_wqe"]) * WQE_BYTES
        if newline and 0 < size <= MAX_WQE * WQE_BYTES and len(rest) >= size:
            ring = Ring(
                rest[:size], *[int(facts[n]) for n in ("qpn", "written", "rung", "completed")],
                str(facts["doorbell_record"]), str(facts["cqe"]), str(facts["name"]),
            )
            ring.completion()
            return ring, rest[size:]
    raise ConfigError(f"{path}: ring {number} is damaged or cut off; dump it again")


# -------------------------------------------------------------------- entries


def entries(ring: Ring) -> list[Entry]:
    """What is in the ring, oldest first: everything that was written and not overwritten."""
    if ring.written is None:
        begin = ring.completed or 0
        return list(_walk(ring, begin, begin + ring.num_wqe, begin, ring.qpn))
    begin = max(0, ring.written - ring.num_wqe)
    return list(_walk(ring, _first_start(ring, begin), ring.written, 0, ring.qpn))


def _walk(ring: Ring, at: int, end: int, origin: int, qpn: int | None):
    while at < end:
        raw = _blocks(ring, at - origin, min(MAX_BLOCKS, end - at))
        if ring.written is None and not raw[:16].strip(b"\0"):
            at += 1  # nothing was ever written here
            continue
        if qpn is None:
            qpn = struct.unpack_from(">I", raw, 4)[0] >> 8  # of the first entry
        verdict = check_entry(raw, at, qpn, end - at)
        step = num_blocks(raw) if _is_start(raw, at, qpn) else 1
        step = min(step, end - at)
        try:
            wqe = Wqe.decode(raw)
        except (ValueError, struct.error):
            wqe = None
        rung = ring.rung is None or at < ring.rung
        yield Entry(at, raw[: step * WQE_BYTES], wqe, verdict, rung)
        at += step


def _first_start(ring: Ring, begin: int) -> int:
    """The oldest blocks may be the rest of an entry whose beginning is overwritten."""
    assert ring.written is not None
    if begin:
        for at in range(begin, min(begin + MAX_BLOCKS, ring.written)):
            if _is_start(_blocks(ring, at, 1), at, ring.qpn):
                return at
    return begin


def _is_start(raw: bytes, index: int, qpn: int | None) -> bool:
    first, second = struct.unpack_from(">II", raw)
    return first >> 8 & 0xFFFF == index & 0xFFFF and (qpn is None or second >> 8 == qpn)


def _blocks(ring: Ring, index: int, count: int) -> bytes:
    slots = [(index + i) % ring.num_wqe * WQE_BYTES for i in range(count)]
    return b"".join(ring.blocks[slot : slot + WQE_BYTES] for slot in slots)


# -------------------------------------------------------------------- words


def ring_lines(ring: Ring, found: list[Entry]) -> list[str]:
    """The ring as text: what it is, then a line per entry and one per fault."""
    lines = [_title(ring, found)]
    head = ("index", "opcode", "qpn", "ds", "bytes", "raddr", "rkey", "lkey", "laddr")
    lines.append(_FORMAT.format(*head).rstrip())
    for entry in found:
        lines.append(_FORMAT.format(*_cells(entry)).rstrip())
        lines += [f"           REFUSED: {why}" for why in entry.verdict.refused]
        lines += [f"           ignored: {why}" for why in entry.verdict.ignored]
        if not entry.is_rung:
            lines.append("           not rung yet")
    return lines


_FORMAT = "{:>10} {:<14} {:<9} {:>2} {:>10} {:<18} {:<10} {:<10} {}"


def _cells(entry: Entry) -> tuple[str, ...]:
    wqe = entry.wqe
    if wqe is None:
        return (str(entry.index), "unreadable", "", "", "", entry.raw[:16].hex(" ", 4), "", "", "")
    lkeys = [f"{s.lkey:#010x}" for s in wqe.data] or ["inline" if wqe.inline is not None else ""]
    more = f" +{len(wqe.data) - 1}" if len(wqe.data) > 1 else ""
    return (
        str(entry.index), wqe.name, f"{wqe.qpn:#08x}", str(wqe.num_segments),
        str(num_data_bytes(wqe)), "" if wqe.raddr is None else f"{wqe.raddr:#x}",
        "" if wqe.rkey is None else f"{wqe.rkey:#010x}", lkeys[0],
        f"{wqe.data[0].addr:#x}{more}" if wqe.data else (wqe.inline or b"").hex(),
    )


def _title(ring: Ring, found: list[Entry]) -> str:
    if ring.written is None:
        return f"{ring.num_wqe} blocks, {len(found)} entries"
    cqe = ring.completion()
    if cqe is None:
        done = "nothing completed"
    elif cqe.is_error:
        done = (f"error completion of entry {cqe.wqe_counter}, syndrome {cqe.syndrome:#04x} "
                f"({syndrome_name(cqe.syndrome)})")
    else:
        done = f"last completion: entry {cqe.wqe_counter}"
    name = f"{ring.name}: " if ring.name else ""
    return (f"{name}qpn {ring.qpn:#08x}, {ring.num_wqe} blocks, written up to {ring.written}, "
            f"rung up to {ring.rung}, {done}")


def dump_path(folder: str, qpn: int) -> Path:
    """A new file for one connection's rings in `folder`, which is made. Raises OSError."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    for number in range(10_000):
        path = Path(folder) / f"{os.getpid()}-{qpn:06x}{f'-{number}' if number else ''}.ring"
        if not path.exists():
            return path
    raise FileExistsError(f"{folder} is full of dumps of process {os.getpid()}; empty it")
