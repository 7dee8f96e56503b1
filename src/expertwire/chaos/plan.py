"""Chaos plans: what happens to a system under load, as JSON. The format is in docs/failures.md."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..config import SIGNAL_MODES
from ..errors import ConfigError
from .network import Network, parse_network

FOLDER = Path(__file__).with_name("plans")
# Actions on servers take one name, a list of names, or "any": one of those that run, by the seed.
SERVER_ACTIONS = ("kill", "stop", "continue", "start", "drain", "error")
REGISTRY_ACTIONS = ("kill_registry", "start_registry")
# After one of these a phase lasts until every client is connected to every server that runs.
RETURNS = ("start", "join", "continue", "error", "start_registry")
MAX_TIMES = 1000  # that a phase, or all of them, are gone through
TAKEN = {"any", "registry", "network", "pauses"}  # names that mean something else


@dataclass
class Phase:
    """What happens at its start, and how long the load then goes on."""

    name: str
    seconds: float
    actions: list[tuple[str, Any]] = field(default_factory=list)
    network: Network | None = None  # None: it is whole
    slow: float | None = None  # this part of every step is added to it; 0.0: nothing, not calm

    @property
    def is_calm(self) -> bool:
        """Nothing happens: a measure for the rest."""
        return not self.actions and self.network is None and self.slow is None

    @property
    def returns(self) -> bool:
        """It lasts until every client is connected again."""
        broke = self.network is not None and self.network.loses_servers
        return broke or any(kind in RETURNS for kind, _ in self.actions)

    @property
    def starts_processes(self) -> bool:
        """Starting takes processor time from the load: no measure of what failures cost."""
        return any(kind in ("start", "join", "start_registry") for kind, _ in self.actions)


@dataclass
class Plan:
    """servers: name -> experts, as for `expertwire serve --experts`."""

    name: str
    phases: list[Phase]
    servers: dict[str, str]
    about: str = ""
    seed: int = 1
    clients: int = 1
    rows: int = 8  # per batch
    rounds: int = 1  # all phases but the first and the last are gone through so many times
    twin: bool = False  # a second, equal system is left alone: what throughput is compared with
    min_steps: int = 0  # the last phase goes on until so many are done
    reply_timeout: float | None = None  # None: adaptive
    signal_mode: str = "write"  # of the clients; a network that reorders needs another
    max_pause_ms: float | None = None  # of a step; None: one deadline and 50 ms (report.py)
    ratio_within: list[float] | None = None  # least and most throughput_ratio; None: any


def plan_names() -> list[str]:
    """The plans that ship with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_plan(which: str) -> Plan:
    """A plan by its name, or from a file. Raises ConfigError."""
    path = FOLDER / f"{which}.json" if which in plan_names() else Path(which)
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"no plan {which!r}: neither a file nor one of {', '.join(plan_names())}"
        ) from None
    except (OSError, ValueError, RecursionError) as err:
        raise ConfigError(f"cannot read the plan {path}: {err}") from None
    return parse_plan(content, path.stem)


def parse_plan(content: object, name: str) -> Plan:
    """Raises ConfigError that says what does not fit."""
    if not isinstance(content, dict):
        raise ConfigError(f"plan {name}: it must be a JSON object")
    known = {f.name for f in fields(Plan)}
    if unknown := set(content) - known:
        raise ConfigError(f"plan {name}: unknown {', '.join(sorted(unknown))}; "
                          f"known are {', '.join(sorted(known))}")
    servers, phases = content.get("servers"), content.get("phases")
    if not isinstance(servers, dict) or not servers or not all(
        isinstance(share, str) for share in servers.values()
    ):
        raise ConfigError(f"plan {name}: servers must be names with their experts, as \"0-7\"")
    if not isinstance(phases, list) or not phases:
        raise ConfigError(f"plan {name}: it has no phases")
    for key, least in (("clients", 1), ("rows", 1), ("rounds", 1), ("min_steps", 0), ("seed", 0)):
        value = content.get(key, least)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"plan {name}: {key} must be a whole number from {least} on")
    if content.get("rounds", 1) > MAX_TIMES:
        raise ConfigError(f"plan {name}: rounds must be at most {MAX_TIMES}")
    for key in ("reply_timeout", "max_pause_ms"):
        value = content.get(key)
        if value is not None and not _is_positive(value):
            raise ConfigError(f"plan {name}: {key} must be a number above 0, or null")
    within = content.get("ratio_within")
    if within is not None and not (isinstance(within, list) and len(within) == 2
                                   and all(map(_is_positive, within)) and within[0] < within[1]):
        raise ConfigError(f"plan {name}: ratio_within must be two numbers above 0, the least and "
                          "the most, or null")
    if not isinstance(content.get("twin", False), bool):
        raise ConfigError(f"plan {name}: twin is true or false")
    for key in ("name", "about"):
        if not isinstance(content.get(key, ""), str):
            raise ConfigError(f"plan {name}: {key} must be a text")
    if content.get("signal_mode", "write") not in list(SIGNAL_MODES):
        raise ConfigError(f"plan {name}: signal_mode is one of {', '.join(SIGNAL_MODES)}")
    rest: dict[str, Any] = {"name": name} | content
    parsed = [_parse_phase(phase, i, name) for i, phase in enumerate(phases)]
    first, *middle, last = parsed if len(parsed) > 1 else [*parsed, []]
    rest["phases"] = list(itertools.chain(first, *middle * content.get("rounds", 1), last))
    plan = Plan(**rest)
    _check_names(plan)
    return plan


def _is_positive(value: object) -> bool:
    return (isinstance(value, int | float) and not isinstance(value, bool)
            and math.isfinite(value) and value > 0)


def _number(value: object, what: str, most: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= most:
        raise ConfigError(f"{what} must be from 0 to {most:g}, not {value!r}")
    return float(value)


def _parse_phase(content: object, idx: int, plan: str) -> list[Phase]:
    """As many of it as it says."""
    where = f"plan {plan}, phase {idx}"
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: it must be a JSON object")
    known = {"name", "seconds", "times", "join", "network", "slow",
             *SERVER_ACTIONS, *REGISTRY_ACTIONS}
    if unknown := set(content) - known:
        raise ConfigError(f"{where}: unknown {', '.join(sorted(unknown))}; "
                          f"known are {', '.join(sorted(known))}")
    seconds = _number(content.get("seconds", 0.0), f"{where}: seconds", 3600)
    slow = _number(content["slow"], f"{where}: slow", 10) if "slow" in content else None
    times = content.get("times", 1)
    if not isinstance(times, int) or isinstance(times, bool) or not 1 <= times <= MAX_TIMES:
        raise ConfigError(f"{where}: times must be a whole number from 1 to {MAX_TIMES}, "
                          f"not {times!r}")
    actions: list[tuple[str, Any]] = []
    for kind, value in content.items():
        if kind in SERVER_ACTIONS:
            names = value if isinstance(value, list) else [value]
            if not all(isinstance(n, str) for n in names):
                raise ConfigError(f"{where}: {kind} takes a server's name")
            actions += [(kind, n) for n in names]
        elif kind == "join":
            if not isinstance(value, dict) or not all(isinstance(s, str) for s in value.values()):
                raise ConfigError(f"{where}: join takes names with their experts")
            actions += [("join", item) for item in value.items()]
        elif kind in REGISTRY_ACTIONS and value:
            actions.append((kind, "registry"))
    network = parse_network(content["network"], where) if "network" in content else None
    words = [f"{kind} {value[0] if kind == 'join' else value}" for kind, value in actions]
    if network is not None:
        words.append(network.words)
    if slow is not None:
        words.append(f"slow {slow:g}")
    name = str(content.get("name") or ", ".join(words) or "calm")
    name = name.replace("_registry registry", " registry")
    return [Phase(name, seconds, actions, network, slow)] * times


def _check_names(plan: Plan) -> None:
    known = set(plan.servers) | {"any"}
    joining = {value[0] for phase in plan.phases for kind, value in phase.actions if kind == "join"}
    if bad := TAKEN & (set(plan.servers) | joining):
        raise ConfigError(f"plan {plan.name}: no server can be called {min(bad)!r}")
    for phase in plan.phases:
        if phase.network is not None:
            if unknown := {*phase.network.cut, *phase.network.hang} - (known - {"any"}):
                raise ConfigError(f"plan {plan.name}, phase {phase.name!r}: there is no server "
                                  f"{min(unknown)!r}")
            if phase.network.reorder and plan.signal_mode == "write":
                raise ConfigError(f"plan {plan.name}, phase {phase.name!r}: a network that "
                                  'reorders needs signal_mode "add" or "write_imm"')
        for kind, value in phase.actions:
            if kind == "join":
                known.add(value[0])
            elif kind in SERVER_ACTIONS and value not in known:
                raise ConfigError(f"plan {plan.name}, phase {phase.name!r}: there is no server "
                                  f"{value!r}")
