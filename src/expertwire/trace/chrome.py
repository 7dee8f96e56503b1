"""From the records of all processes to one Chrome trace: slices, and arrows along each message.

Format: Trace Event Format ("JSON object format": X slices with ts and dur in us, flow events s, t
and f that bind to the slice around them, M names), as Perfetto and chrome://tracing read it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..hca.wqe import Wqe, syndrome_name
from .align import part_offsets
from .file import (
    KIND_ACKNOWLEDGED,
    KIND_ARRIVED,
    KIND_DEVICE,
    KIND_EXECUTED,
    KIND_MESSAGE,
    KIND_POSTED,
    KIND_REPLIED,
    KIND_SPAN,
    KIND_STAGE,
    KIND_TAKEN,
    STAGES,
    Part,
    parts_folder,
    read_part,
)

QUEUE_TRACKS = 1 << 23  # thread ids of queues: above what Linux gives to threads (2^22)
Event = dict[str, Any]
# The steps of a message's way, in their order; each is a slice that its arrow touches.
WAY = ("put", "hca request", "poll", "experts", "reply", "hca reply", "wait", "combine")


def merge(path: str | Path, extra: Sequence[str | Path] = ()) -> Path:
    """Makes the trace of its parts, and of parts brought from other hosts; returns its path.

    Parts stay while processes still write to them. Raises ConfigError if there is nothing to
    merge, or a part is damaged.
    """
    from .recorder import live_parts, locked

    path = Path(path).absolute()
    folder = parts_folder(path)
    if not folder.is_dir() and not extra:
        raise ConfigError(f"there are no parts at {folder}; trace with EXPERTWIRE_TRACE={path}")
    brought = [read_part(Path(file)) for file in extra]
    try:
        folder.mkdir(exist_ok=True)
    except OSError as err:
        raise ConfigError(f"no place for a trace at {path}: {err.strerror}") from err
    with locked(folder):
        files = sorted(folder.glob("*.part"))
        alive = live_parts(folder)
        parts = [*map(read_part, files), *brought]
        if not parts:
            raise ConfigError(f"there are no parts at {folder} yet")
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        with temporary.open("w") as out:
            write_json(chrome_events(parts), out)
        temporary.replace(path)
        if not alive:
            for file in folder.iterdir():
                file.unlink()
            with contextlib.suppress(OSError):  # somebody waits for the lock to begin a new one
                folder.rmdir()
    return path


def write_json(events: Iterable[Event], out: Any) -> None:
    """One event a line, so that text tools can look at it too."""
    out.write('{"displayTimeUnit":"ns","traceEvents":[\n')
    for i, event in enumerate(events):
        out.write(("" if i == 0 else ",\n") + json.dumps(event, separators=(",", ":")))
    out.write("\n]}\n")


def chrome_events(parts: Sequence[Part]) -> list[Event]:
    """Events of all parts on one clock that begins with the first of them."""
    offsets = part_offsets(parts)
    firsts = [int(part.records["begin_ns"].min()) + offset
              for part, offset in zip(parts, offsets, strict=True) if part.records.size]
    base = min(firsts, default=0)
    events: list[Event] = []
    ways: dict[str, dict[str, Event]] = defaultdict(dict)
    pids: set[int] = set()
    for part, offset in zip(parts, offsets, strict=True):
        pid = part.pid
        while pid in pids:  # of another host, or the same process in a second trace
            pid += 1 << 22
        pids.add(pid)
        events += PartEvents(part, pid, offset - base, ways).build()
    events += flows(ways)
    names = [e for e in events if e["ph"] == "M"]
    return names + sorted((e for e in events if e["ph"] != "M"), key=place)


def place(event: Event) -> tuple[float, float]:
    """What begins at the same time as what is inside of it comes first, arrows last."""
    return event["ts"], -event.get("dur", 0.0)


class PartEvents:
    """The events of one process. `ways` collects which slices each message touches."""

    def __init__(self, part: Part, pid: int, offset_ns: int, ways: dict[str, dict[str, Event]]):
        self.part, self.pid, self.offset_ns, self.ways = part, pid, offset_ns, ways
        self.events: list[Event] = []
        self.tracks: dict[int, str] = {}
        self.queues: dict[tuple[int, int], int] = {}
        self.hcas: dict[int, int] = {}
        self.executed: dict[tuple[int, int, int], Event] = {}
        self.posted: dict[tuple[int, int, int], tuple[str, str, str]] = {}  # -> message, peer, way
        self.stage: dict[tuple[int, str], Event] = {}  # the last slice of a thread's stage
        self.batch: dict[int, list[str]] = defaultdict(list)  # what a server's thread has taken
        self.in_flight: dict[tuple[int, int, int], str] = {}  # (hca, seat, seq) -> message
        self.arrived: dict[int, list[tuple[str, float]]] = defaultdict(list)

    def build(self) -> list[Event]:
        handle = {
            KIND_STAGE: self.on_stage, KIND_SPAN: self.on_span, KIND_MESSAGE: self.on_message,
            KIND_REPLIED: self.on_replied, KIND_POSTED: self.on_posted,
            KIND_EXECUTED: self.on_executed, KIND_ARRIVED: self.on_arrived,
            KIND_TAKEN: self.on_taken, KIND_DEVICE: self.on_device,
            KIND_ACKNOWLEDGED: self.on_acknowledged,
        }
        records = self.part.records
        # What the engine executes while a put is under way is written before the put is.
        late = np.isin(records["kind"], (KIND_EXECUTED, KIND_ACKNOWLEDGED))
        for record in [*records[~late], *records[late]]:
            kind = int(record["kind"])
            if kind in handle:
                handle[kind](record)
        name = self.part.name + (
            f" ({self.part.num_lost} older records lost)" if self.part.num_lost else ""
        )
        self.events.append({"ph": "M", "name": "process_name", "pid": self.pid, "tid": 0,
                            "args": {"name": name}})
        for tid, track in self.tracks.items():
            self.events.append({"ph": "M", "name": "thread_name", "pid": self.pid, "tid": tid,
                                "args": {"name": track}})
        return self.events

    # ------------------------------------------------------------ slices

    def slice(self, record: Any, name: str, category: str, tid: int, args: Event) -> Event:
        begin, end = int(record["begin_ns"]), int(record["end_ns"])
        event = {
            "ph": "X", "name": name, "cat": category, "pid": self.pid, "tid": tid,
            "ts": (begin + self.offset_ns) / 1000, "dur": max(0, end - begin) / 1000, "args": args,
        }
        self.events.append(event)
        return event

    def on_span(self, record: Any) -> None:
        name = bytes(record["wqe"]).rstrip(b"\0").decode(errors="replace")
        self.slice(record, name, "span", int(record["thread"]), {})

    def on_device(self, record: Any) -> None:
        name, _, track = bytes(record["wqe"]).rstrip(b"\0").decode(errors="replace").partition("\0")
        tid = self.queues.setdefault((int(record["hca"]), -1), QUEUE_TRACKS + len(self.queues))
        self.tracks[tid] = track
        self.slice(record, name, "device", tid, {})

    def on_stage(self, record: Any) -> None:
        name, tid = STAGES[min(int(record["stage"]), len(STAGES) - 1)], int(record["thread"])
        server = name in ("poll", "gather", "experts", "reply")
        self.tracks[tid] = "server" if server else "client"
        args: Event = {}
        if name not in ("route", "wait", "gather"):
            args["layer"] = int(record["layer"])
        if int(record["rows"]):
            args["rows"] = int(record["rows"])
        if name in ("send", "put", "pack", "wait", "combine"):
            args["seq"] = int(record["seq"])
        event = self.slice(record, name, "server" if server else "client", tid, args)
        self.stage[tid, name] = event
        if name in ("put", "reply", "poll"):
            args["messages"] = []
            if name == "poll":
                self.batch[tid] = []
        elif server:
            args["messages"] = self.batch[tid]
            if name == "experts":
                for message in self.batch[tid]:
                    self.ways[message].setdefault("experts", event)
        elif name == "combine":
            messages = [m for m in self.in_flight.values() if is_of(m, record)]
            args["messages"] = messages
            for message in messages:
                self.ways[message]["combine"] = event
            self.in_flight = {k: m for k, m in self.in_flight.items() if not is_of(m, record)}
        elif name == "wait":
            for message, at in self.arrived.pop(tid, []):
                self.ways[message]["wait"] = {**event, "at": at}
                args.setdefault("messages", []).append(message)

    # ------------------------------------------------------------ messages

    def on_message(self, record: Any) -> None:
        message = message_id(record)
        key = int(record["hca"]), int(record["server"]), int(record["seq"])
        self.in_flight[key] = message
        self.sent(record, "put", message, f"server {int(record['server'])}")

    def on_replied(self, record: Any) -> None:
        self.sent(record, "reply", message_id(record), f"client {int(record['client'])}")

    def sent(self, record: Any, stage: str, message: str, to: str) -> None:
        event = self.stage.get((int(record["thread"]), stage))
        if event is not None:
            event["args"]["messages"].append({
                "id": message, "to": to, "rows": int(record["rows"]),
                "bytes": int(record["num_bytes"]), "wqes": [],
            })
            self.ways[message][stage] = event

    def on_posted(self, record: Any) -> None:
        tid, message = int(record["thread"]), message_id(record)
        put, reply = self.stage.get((tid, "put")), self.stage.get((tid, "reply"))
        event = max((e for e in (put, reply) if e), key=lambda e: e["ts"], default=None)
        if event is None:
            return
        way = "hca request" if event["name"] == "put" else "hca reply"
        for entry in event["args"]["messages"]:
            if entry["id"] == message:
                entry["wqes"].append(decoded(record))
                key = int(record["hca"]), int(record["qpn"]), int(record["idx"])
                self.posted[key] = message, entry["to"], way

    def on_executed(self, record: Any) -> Event:
        hca, qpn, idx = int(record["hca"]), int(record["qpn"]), int(record["idx"])
        tid = self.queues.setdefault((hca, qpn), QUEUE_TRACKS + len(self.queues))
        number = self.hcas.setdefault(hca, len(self.hcas))
        message, peer, way = self.posted.get((hca, qpn, idx), ("", "", ""))
        self.tracks.setdefault(tid, f"HCA {number} qp {qpn:#x}")
        if peer:
            self.tracks[tid] = f"HCA {number} qp {qpn:#x} to {peer}"
        args: Event = {**decoded(record), "moved": int(record["num_bytes"])}
        if message:
            args |= {"message": message, "of": way.removeprefix("hca ")}
        if int(record["syndrome"]):
            args["error"] = syndrome_name(int(record["syndrome"]))
        event = self.slice(record, args["opcode"], "hca", tid, args)
        if message:
            self.ways[message][way] = event  # the last one is the flag
        self.executed[hca, qpn, idx] = event
        return event

    def on_acknowledged(self, record: Any) -> None:
        """The peer's host has said what became of an entry that was sent to it."""
        key = int(record["hca"]), int(record["qpn"]), int(record["idx"])
        event = self.executed.pop(key, None) or self.on_executed(record)  # refused before sending
        told = (int(record["end_ns"]) + self.offset_ns) / 1000
        event["args"]["acknowledged_us"] = round(told - event["ts"], 3)
        if int(record["syndrome"]):
            event["args"]["error"] = syndrome_name(int(record["syndrome"]))

    def on_arrived(self, record: Any) -> None:
        key = int(record["hca"]), int(record["server"]), int(record["seq"])
        if key in self.in_flight:
            at = (int(record["end_ns"]) + self.offset_ns) / 1000
            self.arrived[int(record["thread"])].append((self.in_flight[key], at))

    def on_taken(self, record: Any) -> None:
        tid, message = int(record["thread"]), message_id(record)
        event = self.stage.get((tid, "poll"))
        if event is not None:
            self.batch[tid].append(message)
            event["args"]["messages"].append(message)
            self.ways[message].setdefault("poll", event)
            if int(record["reason"]):
                event["args"]["refused"] = int(record["reason"])


def message_id(record: Any) -> str:
    """A message is one try of one client's chunk at one server; request and reply share it."""
    return f"{int(record['client']):x}.{int(record['server'])}.{int(record['seq'])}"


def is_of(message: str, record: Any) -> bool:
    client, _, seq = message.split(".")
    return client == f"{int(record['client']):x}" and seq == str(int(record["seq"]))


def decoded(record: Any) -> Event:
    """A work-queue entry in words."""
    raw = bytes(record["wqe"])
    try:
        wqe = Wqe.decode(raw)
    except ValueError:  # longer than what is kept, or no entry at all
        return {"opcode": f"opcode {raw[3]:#04x}", "index": int(record["idx"]), "raw": raw.hex()}
    args: Event = {"opcode": wqe.name, "index": int(record["idx"]), "qpn": f"{wqe.qpn:#x}",
                   "bytes": sum(s.num_bytes for s in wqe.data) + len(wqe.inline or b"")}
    if wqe.raddr is not None:
        args |= {"raddr": f"{wqe.raddr:#x}", "rkey": f"{wqe.rkey:#x}"}
    if wqe.data:
        args |= {"laddr": f"{wqe.data[0].addr:#x}", "lkey": f"{wqe.data[0].lkey:#x}"}
    return args


def flows(ways: dict[str, dict[str, Event]]) -> list[Event]:
    """An arrow from slice to slice along each message's way."""
    events = []
    for number, (message, way) in enumerate(sorted(ways.items()), 1):
        steps = [way[step] for step in WAY if step in way]
        if len(steps) < 2:
            continue
        at = 0.0
        for i, event in enumerate(steps):
            # Inside its slice: a nanosecond before its end, when a viewer takes it for closed. And
            # not before the step before: a poll may begin before its message is there.
            last = event["ts"] + max(0.0, event["dur"] - 0.001)
            at = max(at, min(max(at, event.get("at", event["ts"])), last))
            events.append({
                "ph": "s" if i == 0 else "f" if i == len(steps) - 1 else "t", "id": number,
                "name": "message", "cat": "message", "pid": event["pid"], "tid": event["tid"],
                "ts": at, "bp": "e", "args": {"message": message},
            })
    return events
