"""Who is a member: ids, seats, epochs, the plan for `--experts auto`. No sockets, no clock reads.

The registry's rules in one place. Epochs only grow, also across restarts: from a state file, from
the wall clock in milliseconds, and from what servers and clients say they have seen already.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from ..control.channel import MAX_FRAME_BYTES
from ..control.credentials import printable
from ..errors import ConfigError, ProtocolError
from .placement import plan_experts

if TYPE_CHECKING:
    from .moves import Move

log = logging.getLogger("expertwire.registry.registry")

MAX_NUM_EXPERTS = 1 << 16
MAX_STATS_BYTES = 1 << 16  # of one server
MAX_FREED_SEATS = 64
MAX_EPOCH = 1 << 62  # the wire has 64 bits
# How long a plan outlives the connection that asked for it: long enough to register, short enough
# that a server which died while loading does not leave its experts to nobody.
PLAN_GRACE_SECONDS = 2.0


class Member:
    """One server as the registry knows it."""

    def __init__(self, server_id: str, seat: int, epoch: int, facts: dict[str, Any], now: float):
        self.server_id = server_id
        self.seat = seat
        self.epoch_joined = epoch
        self.facts = facts  # name, address, host_id, pid, model, experts
        self.draining = False
        self.stats: dict[str, Any] = {}
        self.last_heard = now
        self.reports = 0
        self.last_report = ""
        self.move: Move | None = None  # what it was asked to hold (moves.py)
        # The epoch under which its experts were published last, when, and which one all have seen.
        self.listed_epoch, self.listed_at, self.settled_epoch = epoch, now, 0
        self._counted: tuple[list[int], int] = ([], 0)  # experts, and the bytes with them

    def num_bytes(self) -> int:
        """Its part of the list of members. Encoded once per set of experts: servers join often."""
        if self._counted[0] is not self.facts["experts"]:
            self._counted = (self.facts["experts"], encoded_bytes(self.as_dict()))
        return self._counted[1]

    def as_dict(self) -> dict[str, Any]:
        return {
            "server_id": self.server_id, "seat": self.seat, "epoch_joined": self.epoch_joined,
            "draining": self.draining, **self.facts,
        }


def encoded_bytes(value: dict[str, Any]) -> int:
    """Of a message's item, with room for the comma and for `false` where it was `true`."""
    return len(json.dumps(value, separators=(",", ":"))) + 2


@dataclass(eq=False)
class Plan:
    """Experts promised to a server that is still loading them."""

    fingerprint: str
    experts: list[int]
    until: float | None = None  # None: while the server's connection lasts


class Roster:
    """All members. `now` arguments are seconds of any steady clock. Not thread-safe."""

    def __init__(self, state_path: Path | None = None):
        self.members: dict[str, Member] = {}
        self.reports = 0
        self._state_path = state_path
        self._next_seat = 0
        self._freed: dict[int, str] = {}  # seat -> address of who had it, oldest first
        self._planned: list[Plan] = []
        self.epoch = time.time_ns() // 1_000_000
        if state_path is not None:
            self._load(state_path)

    # ---------------------------------------------------------------- joining and leaving

    def register(self, message: dict, now: float) -> Member:
        """A new member. A server that comes back after a break gets its id and seat again if it
        names them and nobody else has them.

        Raises ProtocolError for a malformed message, ConfigError for another model than the one
        that is served, or when the list of members would not fit a message.
        """
        facts = check_facts(message)
        # The same listening socket: the same process, whose old connection is not yet gone.
        stale = [m for m in self.members.values() if m.facts["address"] == facts["address"]]
        for other in self.members.values():
            if other not in stale:
                refuse_other_model(other.facts["model"], facts["model"])
        self._check_room(facts, stale)
        for member in stale:
            self._drop(member)
        server_id = self._free_id(message.get("server_id"), facts["name"])
        seat = self._free_seat(message.get("seat"), facts["address"])
        self._settle_plan(facts["model"]["fingerprint"], facts["experts"])
        self.saw_epoch(message.get("epoch"))
        member = Member(server_id, seat, self.epoch + 1, facts, now)
        member.draining = message.get("draining") is True
        self.members[server_id] = member
        log.info("server %s joined with %d experts", server_id, len(facts["experts"]))
        self.bump()
        return member

    def remove(self, member: Member, why: str) -> bool:
        """False if it is no member any more."""
        if self.members.get(member.server_id) is not member:
            return False
        self._drop(member)
        log.info("server %s removed: %s", member.server_id, why)
        self.bump()
        return True

    def drain(self, name: str) -> Member | None:
        """Marks a server (by id, or by seat) as leaving; None if there is none."""
        found = self.members.get(name) or next(
            (m for m in self.members.values() if str(m.seat) == name), None
        )
        if found is not None and not found.draining:
            found.draining = True
            self.bump()
        return found

    def report(self, name: str, what: str) -> None:
        """Counts an observation. It never changes membership."""
        self.reports += 1
        reported = self.members.get(name)
        if reported is not None:
            reported.reports += 1
            reported.last_report = printable(what)

    def _drop(self, member: Member) -> None:
        del self.members[member.server_id]
        self._freed[member.seat] = member.facts["address"]

    def _free_id(self, wanted: object, name: str) -> str:
        server_id = wanted if isinstance(wanted, str) and 0 < len(wanted) <= 80 else name
        server_id = printable(server_id)
        while server_id in self.members:
            server_id = f"{name}-{secrets.token_hex(2)}"
        return server_id

    def _free_seat(self, wanted: object, address: str) -> int:
        if is_count(wanted, 0, (1 << 31) - 1):
            taken = any(m.seat == wanted for m in self.members.values())
            if not taken and self._freed.get(wanted, address) == address:
                self._freed.pop(wanted, None)
                self._next_seat = max(self._next_seat, wanted + 1)
                return wanted
        # Freed seats come back oldest first and only when many are free, so that whoever still
        # holds an old list does not take one server for another.
        if len(self._freed) > MAX_FREED_SEATS:
            seat = next(iter(self._freed))
            del self._freed[seat]
            return seat
        self._next_seat += 1
        return self._next_seat - 1

    def _check_room(self, facts: dict, stale: list[Member]) -> None:
        others = [m for m in self.members.values() if m not in stale]
        size = sum(m.num_bytes() for m in others) + encoded_bytes(facts) + 2048
        if size > MAX_FRAME_BYTES:
            raise ConfigError(
                f"the registry is full: with {len(others)} servers the list of members has reached "
                "its limit of 1 MiB; start another registry for more"
            )

    def describe(self, now: float) -> list[dict[str, Any]]:
        """All members with what they reported, for `expertwire status`."""
        return [
            {**m.as_dict(), "stats": m.stats, "reports": m.reports, "last_report": m.last_report,
             "silent_s": round(now - m.last_heard, 3)} for m in self.members.values()
        ]

    # ---------------------------------------------------------------- plan

    def plan(self, model: object, num_servers: object, now: float) -> Plan:
        """Experts for one more server. Counts as held until it registers or `end_plan`.

        Raises ProtocolError for a malformed request, ConfigError for another model.
        """
        model = check_model(model)
        if num_servers is not None and not is_count(num_servers, 1, 1 << 16):
            raise ConfigError(
                f"{printable(num_servers, 20)} servers; it must be a number from 1 to 65536"
            )
        for member in self.members.values():
            refuse_other_model(member.facts["model"], model)
        self._planned = [p for p in self._planned if p.until is None or p.until > now]
        held = [set(m.facts["experts"]) for m in self.members.values() if not m.draining]
        held += [set(p.experts) for p in self._planned if p.fingerprint == model["fingerprint"]]
        plan = Plan(
            model["fingerprint"], plan_experts(model["num_experts"], held, num_servers)
        )
        self._planned.append(plan)
        return plan

    def end_plan(self, plan: Plan, now: float) -> None:
        """The connection that asked for the plan has ended."""
        plan.until = now + PLAN_GRACE_SECONDS

    def _settle_plan(self, fingerprint: str, experts: list[int]) -> None:
        for plan in self._planned:
            if plan.fingerprint == fingerprint and plan.experts == experts:
                self._planned.remove(plan)
                return

    # ---------------------------------------------------------------- epoch and state file

    def saw_epoch(self, seen: object) -> bool:
        """A peer knows `seen` from before a restart: no list of ours may carry an epoch up to it.

        True if that moved the epoch.
        """
        if not is_count(seen, self.epoch, MAX_EPOCH):
            return False
        self.epoch = seen
        self.bump()
        return True

    def bump(self) -> None:
        self.epoch += 1
        self._save()

    def _load(self, path: Path) -> None:
        try:
            text = path.read_text()
        except FileNotFoundError:
            text = ""
        except (OSError, UnicodeDecodeError) as err:
            raise ConfigError(f"cannot read the registry state {path}: {err}") from None
        if text:
            try:
                state = json.loads(text)
                epoch, next_seat = state["epoch"], state.get("next_seat", 0)
                if not is_count(epoch, 0, MAX_EPOCH) or not is_count(next_seat, 0, (1 << 31) - 1):
                    raise ValueError("no numbers that a registry writes")
                self.epoch, self._next_seat = max(self.epoch, epoch + 1), next_seat
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise ConfigError(
                    f"{path} is not a registry state; remove it or name another file with --state"
                ) from None
        try:
            self._write(path)
        except OSError as err:
            raise ConfigError(
                f"cannot write the registry state {path}: {err.strerror or err}; name another file "
                "with --state"
            ) from None

    def _save(self) -> None:
        if self._state_path is None:
            return
        try:
            self._write(self._state_path)
        except OSError as err:
            # The wall clock and what peers have seen still make epochs grow after a restart.
            log.error("cannot write %s: %s", self._state_path, err)

    def _write(self, path: Path) -> None:
        fresh = path.with_name(path.name + ".new")
        try:
            fresh.write_text(json.dumps({"epoch": self.epoch, "next_seat": self._next_seat}))
            os.replace(fresh, path)
        except OSError:
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise


# -------------------------------------------------------------------- what servers say


def is_count(value: object, least: int, most: int) -> TypeGuard[int]:
    """An integer (no bool) from `least` to `most`."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def check_model(model: object) -> dict[str, Any]:
    """Raises ProtocolError unless these are a model's facts as far as the registry needs them."""
    if not isinstance(model, dict) or not isinstance(model.get("fingerprint"), str):
        raise ProtocolError("the message has no model with a fingerprint")
    if not is_count(model.get("num_experts"), 1, MAX_NUM_EXPERTS):
        raise ProtocolError(f"num_experts is {printable(model.get('num_experts'), 20)}; "
                            f"1 to {MAX_NUM_EXPERTS} are possible")
    return model


def check_facts(message: dict) -> dict[str, Any]:
    """A server's facts out of its register message. Raises ProtocolError."""
    model, experts = check_model(message.get("model")), message.get("experts")
    most = model["num_experts"] - 1
    if not isinstance(experts, list) or not all(is_count(e, 0, most) for e in experts):
        raise ProtocolError(f"register needs a list of experts from 0 to {most}")
    if not isinstance(model.get("dtype"), str):
        raise ProtocolError("register needs the dtype that the server computes in")
    address = message.get("address")
    if not isinstance(address, str) or not 0 < len(address) <= 107:
        raise ProtocolError("register needs the address that the server listens on")
    pid, host_id = message.get("pid"), message.get("host_id")
    room = message.get("room")  # experts that it has memory for, None: it does not say
    return {
        "name": printable(message.get("name") or "server", 64), "address": address,
        "host_id": printable(host_id or "", 64), "pid": pid if isinstance(pid, int) else None,
        "model": model, "experts": sorted(set(experts)),
        "room": room if is_count(room, 1, MAX_NUM_EXPERTS) else None,
    }


def refuse_other_model(served: dict, offered: dict) -> None:
    """Raises ConfigError, with both names, unless the two are one model."""
    if served["fingerprint"] != offered["fingerprint"]:
        names = [f"{printable(m.get('name'), 64)} (fingerprint {printable(m['fingerprint'], 12)})"
                 for m in (served, offered)]
        raise ConfigError(
            f"this registry serves {names[0]}, not {names[1]}; start another registry for another "
            "model"
        )
    if offered.get("dtype", served["dtype"]) != served["dtype"]:  # a plan is asked for without one
        raise ConfigError(
            f"the servers of this registry compute in {printable(served['dtype'], 16)}, not in "
            f"{printable(offered['dtype'], 16)}; start this one with --dtype "
            f"{printable(served['dtype'], 16)}, or another registry"
        )


def check_stats(stats: object) -> dict[str, Any]:
    """A heartbeat's statistics, or {} if they are not an object of at most 64 KiB."""
    if not isinstance(stats, dict) or len(json.dumps(stats)) > MAX_STATS_BYTES:
        return {}
    return stats


