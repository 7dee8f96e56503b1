"""`expertwire rebalance`: which expert should be where, from what each was asked to do.

Greedy, in two steps (the idea of expert-parallel load balancers): first every place beyond one per
expert goes to the expert with the most rows per replica; then replicas are packed, the heaviest
first, each onto the server with the least load that has room. A server that holds the expert
already is preferred up to a fair load, so that few weights move.
"""

from __future__ import annotations

import functools
import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..control.frames import load_token
from ..errors import ConfigError
from ..observe.status_tables import expert_ranges
from .question import ask as ask_once
from .turn import Turn

STAY_SHARE = 0.05  # a server may get so much more than the mean load by what it holds already


@dataclass(frozen=True)
class Rebalance:
    """A plan. experts: server -> what it should hold, ascending; loads: rows per server."""

    experts: dict[str, list[int]]
    loads: dict[str, float]
    loads_before: dict[str, float]
    added: dict[str, list[int]]
    removed: dict[str, list[int]]

    def as_dict(self) -> dict[str, Any]:
        return {
            "servers": {
                name: {"experts": self.experts[name], "add": self.added[name],
                       "remove": self.removed[name], "load": round(self.loads[name], 1),
                       "load_before": round(self.loads_before[name], 1)} for name in self.experts
            },
            "imbalance": imbalance(self.loads), "imbalance_before": imbalance(self.loads_before),
        }


def imbalance(loads: Mapping[str, float]) -> float:
    """The busiest server's load over the mean: 1.0 is even."""
    mean = sum(loads.values()) / max(len(loads), 1)
    return round(max(loads.values()) / mean, 4) if mean > 0 else 1.0


def num_replicas(rows: Sequence[float], num_places: int, most: int) -> list[int]:
    """How many servers should hold each expert: at least one, at most `most`.

    Raises ConfigError if there are fewer places than experts.
    """
    if num_places < len(rows):
        raise ConfigError(f"{len(rows)} experts do not fit {num_places} places; add servers")
    counts = [1] * len(rows)
    heap = [(-load, expert) for expert, load in enumerate(rows)]
    heapq.heapify(heap)
    for _ in range(num_places - len(rows)):
        while heap and counts[heap[0][1]] >= most:
            heapq.heappop(heap)
        if not heap:
            break
        _, expert = heap[0]
        counts[expert] += 1
        heapq.heapreplace(heap, (-rows[expert] / counts[expert], expert))
    return counts


def plan_rebalance(
    held: Mapping[str, Sequence[int]], rows: Sequence[float],
    places: Mapping[str, int] | None = None,
) -> Rebalance:
    """A placement for measured loads.

    held: server -> its experts. rows: per expert, what all servers together were asked for.
    places: server -> how many experts it has room for; default: as many as it holds. The same
    arguments always give the same plan. Raises ConfigError if the experts do not fit.
    """
    room = dict(places or {name: len(set(experts)) for name, experts in held.items()})
    counts = num_replicas(rows, sum(room[name] for name in held), len(held))
    share = [load / count for load, count in zip(rows, counts, strict=True)]
    enough = (1 + STAY_SHARE) * sum(rows) / len(held)
    loads = dict.fromkeys(sorted(held), 0.0)
    target: dict[str, set[int]] = {name: set() for name in loads}
    before = {name: set(experts) for name, experts in held.items()}
    num_waiting = len(rows)  # experts that are nowhere yet: each of them has a place kept
    for expert in sorted(range(len(rows)), key=lambda e: (-share[e], e)):
        num_waiting -= 1
        for replica in range(counts[expert]):
            fits = [n for n in loads if room[n] > 0 and expert not in target[n]]
            if not fits or (replica > 0 and sum(room[n] for n in loads) <= num_waiting):
                break
            stay = [n for n in fits if expert in before[n] and loads[n] + share[expert] <= enough]
            chosen = min(stay or fits, key=lambda n: loads[n])
            target[chosen].add(expert)
            loads[chosen] += share[expert]
            room[chosen] -= 1
    holders = [sum(e in experts for experts in target.values()) for e in range(len(rows))]
    loads = _loads(target, rows, holders)
    held_by = [sum(e in experts for experts in before.values()) for e in range(len(rows))]
    return Rebalance(
        {name: sorted(target[name]) for name in loads}, loads, _loads(before, rows, held_by),
        {name: sorted(target[name] - before[name]) for name in loads},
        {name: sorted(before[name] - target[name]) for name in loads},
    )


def _loads(
    placement: Mapping[str, set[int]], rows: Sequence[float], holders: Sequence[int]
) -> dict[str, float]:
    """Rows per server if replicas share evenly, as clients route."""
    return {name: sum(rows[e] / holders[e] for e in sorted(placement[name]))
            for name in sorted(placement)}


def measured_rows(servers: Sequence[Mapping[str, Any]], num_experts: int) -> list[float]:
    """Rows per expert over all servers, from their statistics."""
    rows = [0.0] * num_experts
    for server in servers:
        stats = server.get("stats") or {}
        ids = stats.get("row_experts") or server["experts"]  # what it dropped counts, too
        for expert, count in zip(ids, stats.get("expert_rows") or [], strict=False):
            rows[expert] += count
    return rows


def run_rebalance(
    registry: str, *, seconds: float, places: int | None, dry_run: bool, timeout: float = 600.0,
    quiet: bool = False, sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Measures for `seconds` (0: since each server's start), plans, and applies unless dry_run.

    places: experts that each server has room for; default: what it says (`serve --room`), or as
    many as it holds. Raises ConfigError if there is no server, the experts do not fit, or somebody
    else is moving experts; WaitTimeout if servers need more than `timeout` seconds for it, or the
    registry goes away.
    """
    token = load_token(create=False)
    if dry_run:
        ask = functools.partial(ask_once, registry, token)
        return _rebalance(ask, None, seconds, places, quiet, sleep)
    with Turn(registry, token, sleep=sleep) as turn:  # what is measured now is what will be moved
        return _rebalance(turn.ask, timeout, seconds, places, quiet, sleep)


def _rebalance(
    ask: Callable[[dict], dict], timeout: float | None, seconds: float, places: int | None,
    quiet: bool, sleep: Callable[[float], None],
) -> dict[str, Any]:
    """timeout: for moving the experts; None: they are not moved."""
    from .rebalance_apply import apply_plan

    first = ask({"type": "status"})
    if seconds > 0:
        # Statistics come with heartbeats, four in a lease.
        sleep(seconds + first["lease_seconds"] / 4)
    last = ask({"type": "status"}) if seconds > 0 else first
    servers = [s for s in last["servers"] if not s["draining"]]
    if not servers:
        raise ConfigError("the registry knows no server that stays")
    num_experts = servers[0]["model"]["num_experts"]
    rows = measured_rows(servers, num_experts)
    if seconds > 0:
        known = {s["server_id"] for s in servers}
        earlier = measured_rows(
            [s for s in first["servers"] if s["server_id"] in known], num_experts
        )
        rows = [max(0.0, now - then) for now, then in zip(rows, earlier, strict=True)]
    held = {s["server_id"]: s["experts"] for s in servers}
    room = {s["server_id"]: places or s.get("room") or len(s["experts"]) for s in servers}
    plan = plan_rebalance(held, rows, room)
    if not quiet:
        for line in plan_lines(plan):
            print(line)
    result = {**plan.as_dict(), "rows": rows}
    if timeout is not None:
        done = apply_plan(ask, plan, room, timeout=timeout, sleep=sleep,
                          say=(lambda _: None) if quiet else print)
        result["applied"] = done.as_dict()
        if not quiet:
            print(f"added {done.num_added} and removed {done.num_removed} replicas in "
                  f"{done.seconds:.1f} s")
    return result


def plan_lines(plan: Rebalance) -> list[str]:
    lines = []
    for name, experts in plan.experts.items():
        changes = [f"{sign}{expert_ranges(which[name])}" for sign, which in
                   (("add ", plan.added), ("remove ", plan.removed)) if which[name]]
        lines.append(f"{name}: {'; '.join(changes) or 'as it is'} -> "
                     f"{expert_ranges(experts) or 'nothing'} "
                     f"({plan.loads_before[name]:.0f} -> {plan.loads[name]:.0f} rows)")
    lines.append(f"busiest server over mean: {imbalance(plan.loads_before):.2f} -> "
                 f"{imbalance(plan.loads):.2f}")
    return lines
