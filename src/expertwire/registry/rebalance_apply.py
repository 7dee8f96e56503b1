"""`expertwire rebalance`: makes servers hold what a plan says, in waves, while they serve on.

Every wave first adds experts, at most as many as a server has room for (one if it is full), then
takes away what is to go and is held elsewhere by now. So no expert is ever without a server, and no
server holds more than one expert beyond its room. If this process ends in the middle, what there is
is a valid placement with more replicas than planned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError, WaitTimeout
from ..observe.status_tables import expert_ranges
from .rebalance import Rebalance

LOOK_SECONDS = 0.1
Ask = Callable[[dict], dict]  # a question to the registry -> its answer


@dataclass
class Applied:
    """What became of a plan. failed: server -> why it does not hold what it should."""

    failed: dict[str, str] = field(default_factory=dict)
    num_added: int = 0
    num_removed: int = 0
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return {"added": self.num_added, "removed": self.num_removed, "failed": self.failed,
                "seconds": round(self.seconds, 3)}


def wave(
    held: Mapping[str, set[int]], target: Mapping[str, set[int]], room: Mapping[str, int],
) -> dict[str, set[int]]:
    """The next lists of the servers that change: additions first, then removals.

    held, target: of servers that are there and take part. Empty: done, as far as it can be.
    """
    removing = removals(held, target)
    adding = {}
    for name, experts in target.items():
        missing = sorted(experts - held[name])
        if missing:
            count = max(1, room[name] - len(held[name]))
            adding[name] = held[name] | set(missing[:count])
    # A server beyond its room removes before it adds more.
    fitting = {name: experts for name, experts in adding.items() if len(held[name]) <= room[name]}
    return fitting or removing


def removals(
    held: Mapping[str, set[int]], target: Mapping[str, set[int]]
) -> dict[str, set[int]]:
    """Lists without experts that are to go and that another server holds, and keeps."""
    left = {name: set(experts) for name, experts in held.items()}
    for name in sorted(left):
        if name not in target:
            continue
        for expert in sorted(left[name] - target[name]):
            others = [n for n in left if n != name and expert in left[n]]
            if others and len(left[name]) > 1:
                left[name].discard(expert)
    return {name: experts for name, experts in left.items() if experts != held[name]}


def apply_plan(
    ask: Ask, plan: Rebalance, room: Mapping[str, int], *, timeout: float,
    say: Callable[[str], None] = lambda _: None, sleep: Callable[[float], None] = time.sleep,
) -> Applied:
    """Carries out a plan. ask: `Turn.ask`. room: server -> experts it has room for.

    A server that fails or vanishes takes no further part; the others go on, and keep what it
    should have taken. Raises what `ask` does, and WaitTimeout after `timeout` seconds.
    """
    start = time.monotonic()
    deadline, result = start + timeout, Applied()
    target = {name: set(experts) for name, experts in plan.experts.items()}
    while True:
        held, draining = _held(ask)
        for name in [n for n in target if n not in held or n in draining]:
            result.failed[name] = "it left while experts were moved"
            del target[name]
        staying = {name: experts for name, experts in held.items() if name not in draining}
        changes = wave(staying, target, room)
        if not changes:
            break
        serials = {}
        for name, experts in changes.items():
            say(_line(name, staying[name], experts))
            try:
                answer = ask({"type": "place", "server_id": name, "experts": sorted(experts)})
                serials[name] = answer["serial"]
            except ConfigError as err:
                result.failed[name] = str(err)
                del target[name]
        for name, why in _wait(ask, serials, deadline, sleep).items():
            result.failed[name] = why
            target.pop(name, None)
        after, _ = _held(ask)
        for name in changes:
            result.num_added += len(after.get(name, staying[name]) - staying[name])
            result.num_removed += len(staying[name] - after.get(name, staying[name]))
    result.seconds = time.monotonic() - start
    return result


def _line(name: str, before: set[int], after: set[int]) -> str:
    parts = [f"{what} {expert_ranges(sorted(which))}" for what, which in
             (("loads", after - before), ("lets go of", before - after)) if which]
    return f"{name} {', '.join(parts)}"


def _held(ask: Ask) -> tuple[dict[str, set[int]], set[str]]:
    """(server -> experts, those that are draining)."""
    servers = ask({"type": "status"})["servers"]
    return ({s["server_id"]: set(s["experts"]) for s in servers},
            {s["server_id"] for s in servers if s["draining"]})


def _wait(
    ask: Ask, serials: Mapping[str, int], deadline: float, sleep: Callable[[float], None],
) -> dict[str, str]:
    """Until all have done what they were asked to; server -> reason for those that have not."""
    failed: dict[str, str] = {}
    open_ = dict(serials)
    while open_:
        servers = ask({"type": "status"})["servers"]
        states = {s["server_id"]: s for s in servers}
        for name, serial in list(open_.items()):
            server = states.get(name)
            move = (server or {}).get("move") or {}
            if server is None:
                failed[name] = "it ended while it was loading experts"
            elif move.get("serial") != serial:
                failed[name] = "it was asked for something else, or the registry restarted"
            elif move["state"] == "failed":
                failed[name] = move["reason"]
            elif move["state"] != "done" or not server["settled"]:
                continue
            del open_[name]
        if open_ and time.monotonic() > deadline:
            raise WaitTimeout(
                f"{', '.join(sorted(open_))} did not finish in time; what was moved stays, run "
                "`expertwire rebalance` again", "rebalance", sorted(open_)[0],
            )
        if open_:
            sleep(LOOK_SECONDS)
    return failed
