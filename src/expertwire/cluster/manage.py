"""What `up`, `down`, `scale` and `status --cluster` do, on whatever a cluster runs."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from ..control.credentials import load_token
from ..errors import ConfigError, ExpertwireError, WaitTimeout
from ..observe.status_tables import expert_ranges
from ..registry.drain import run_drain
from ..registry.question import ask
from .arguments import REGISTRY, free_names
from .backend import FAILED, SERVING, STARTING, Backend, ProcessFacts
from .config import ClusterConfig, load_config
from .records import changing, find_record, only_name, remove_record, write_record

LOOK_SECONDS = 0.1


def open_backend(config: ClusterConfig, where: str) -> Backend:
    """where: "local" or "ray". Raises ConfigError for another, or without Ray."""
    if config.token_file:  # for what this process asks the registry, too
        os.environ["EXPERTWIRE_TOKEN_FILE"] = config.token_file
        os.environ.pop("EXPERTWIRE_TOKEN", None)
    if where == "local":
        from .local import LocalBackend

        return LocalBackend(config)
    if where == "ray":
        from .ray import RayBackend

        return RayBackend(config)
    raise ConfigError(f"--on {where!r}: it is local or ray")


def find_cluster(which: str | None, where: str | None) -> tuple[str, Backend]:
    """The name and backend of a cluster that is up. which: its name, its YAML file, or None for
    the only one. where: for a YAML file of a cluster that was started elsewhere."""
    name, config = _named(which)
    found = find_record(name)
    if found:
        return name, open_backend(found[1], where or found[0])
    if config and where:
        return name, open_backend(config, where)
    raise ConfigError(f"no cluster {name!r} was started from here; its YAML file and --on say how "
                      "to reach one that was started elsewhere")


def _named(which: str | None) -> tuple[str, ClusterConfig | None]:
    which = only_name() if which is None else which
    config = load_config(which) if which.endswith((".yaml", ".yml")) else None
    return (config.name if config else which), config


def up(path: str, where: str, *, timeout: float, quiet: bool = False) -> dict[str, Any]:
    """Starts a cluster and waits until all its servers are listed; the facts of `report`.

    Raises ConfigError for a bad file or a cluster that is up already; what made a process fail;
    WaitTimeout. After an error nothing of it is left.
    """
    config = load_config(path)
    with changing(config.name):
        return _up(config, path, where, timeout, quiet)


def _up(
    config: ClusterConfig, path: str, where: str, timeout: float, quiet: bool
) -> dict[str, Any]:
    found = find_record(config.name)
    if found and (found[0] != where or open_backend(found[1], where).describe()):
        raise ConfigError(f"cluster {config.name} is up already, on {found[0]}; `expertwire "
                          f"down {config.name}` ends it")
    backend = open_backend(config, where)
    if not Path(config.model).is_dir() and where == "local":
        raise ConfigError(f"{path}: model: there is no folder {config.model}")
    load_token()  # made now if there is none: the processes would race for it
    write_record(config, where)
    try:
        backend.start()
        _wait_listed(backend, config.servers.count, timeout, quiet)
    except BaseException:
        backend.stop()
        remove_record(config.name)
        raise
    return report(config.name, backend)


def down(which: str | None, where: str | None = None, *, forget: bool = False) -> str:
    """Ends a cluster; returns its name when nothing of it is left.

    forget: end nothing, drop what is noted about it: for one whose Ray cluster is gone for good.
    Raises ConfigError if there is none, or to forget one of this host, which can be ended.
    """
    if forget:
        name = _named(which)[0]
        found = find_record(name)
        if not found or found[0] == "local":
            raise ConfigError("--forget is for a cluster on Ray that was started from here; "
                              f"{name} is none")
        remove_record(name)
        return name
    name, backend = find_cluster(which, where)
    backend.stop()
    remove_record(name)
    return name


def scale(
    which: str | None, count: int, *, where: str | None = None, timeout: float = 300.0,
    quiet: bool = False,
) -> dict[str, Any]:
    """Starts or drains servers until there are `count`; the facts of `report`.

    Raises ConfigError, before anything has changed, if servers would have to go that alone hold
    some expert; WaitTimeout.
    """
    name, backend = find_cluster(which, where)
    with changing(name):
        return _scale(name, backend, count, timeout, quiet)


def _scale(name: str, backend: Backend, count: int, timeout: float, quiet: bool) -> dict[str, Any]:
    there = [p.name for p in backend.describe() if p.name != REGISTRY]
    if count > len(there):
        backend.add(free_names(there, count - len(there)), count)
        _wait_listed(backend, count, timeout, quiet)
    elif count < len(there):
        for server in _dispensable(backend, there, len(there) - count):
            for member in _members(backend):
                if member["name"] == server:
                    run_drain(backend.registry_address(), member["server_id"], timeout=timeout,
                              quiet=quiet)
            backend.remove(server)
    return report(name, backend)


def report(name: str, backend: Backend) -> dict[str, Any]:
    """Processes with their places, and what the registry knows of the servers."""
    registry = backend.registry_address()
    members = {m["name"]: m for m in _members(backend)}
    return {
        "cluster": name, "registry": registry,
        "processes": [_row(p, members.get(p.name)) for p in backend.describe()],
    }


def report_lines(facts: dict[str, Any]) -> list[str]:
    """`report` for people: a line of titles, a line a process."""
    rows = [("process", "state", "node", "pid", "restarts", "experts", "log")]
    for p in facts["processes"]:
        rows.append((p["name"], p["state"], p["node"] or "-", str(p["pid"] or "-"),
                     "some" if p["restarts"] is None else str(p["restarts"]),
                     expert_ranges(p["experts"]) or "-", p["log"]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
             for row in rows]
    return [f"cluster {facts['cluster']}, registry {facts['registry']}", *lines]


def _row(process: ProcessFacts, member: dict[str, Any] | None) -> dict[str, Any]:
    state = SERVING if member and process.state == STARTING else process.state
    member = member or {}
    return {**vars(process), "state": state, "server_id": member.get("server_id"),
            "address": member.get("address"), "experts": member.get("experts", [])}


def _members(backend: Backend) -> list[dict[str, Any]]:
    return ask(backend.registry_address(), load_token(create=False), {"type": "status"})["servers"]


def _dispensable(backend: Backend, there: list[str], count: int) -> list[str]:
    """The newest servers that can go: what they hold is held by others that stay."""
    held = {m["name"]: set(m["experts"]) for m in _members(backend) if not m["draining"]}
    every = set().union(*held.values())
    stay, going = list(there), []
    # Those that hold nothing go first: they never came up, or wait for a place.
    for name in [*[n for n in there if not held.get(n)], *reversed(there)]:
        rest = set().union(*(experts for n, experts in held.items() if n in stay and n != name))
        if len(going) < count and name in stay and rest >= every:
            stay.remove(name)
            going.append(name)
    if len(going) < count:
        alone = sorted(every - set().union(*(held.get(n, set()) for n in stay[:-1])))
        raise ConfigError(
            f"only {len(going)} of {count} servers can go: nobody else holds expert "
            f"{expert_ranges(alone)}; start with servers.replicas or larger shares, or give "
            "servers.room and run `expertwire rebalance`"
        )
    return going


def _wait_listed(backend: Backend, count: int, timeout: float, quiet: bool) -> None:
    """Until `count` servers of the cluster are members."""
    deadline, said = time.monotonic() + timeout, -1
    while True:
        processes = backend.describe()
        for process in processes:
            if process.state == FAILED:
                raise ExpertwireError(f"{process.name} failed: {process.said or 'no output'}")
        names = {p.name for p in processes} - {REGISTRY}
        listed = len(names & {m["name"] for m in _members_when_there(backend, deadline)})
        if listed != said and not quiet:
            print(f"{listed} of {count} servers", file=sys.stderr, flush=True)
            said = listed
        if listed >= count:
            return
        if time.monotonic() > deadline:
            waiting = [f"{p.name} is {p.state}" for p in processes]
            raise WaitTimeout(
                f"{listed} of {count} servers after {timeout:g} s ({', '.join(waiting)}); on Ray a "
                "server that starts may wait for resources that no node has", "up",
                backend.registry_address(),
            )
        time.sleep(LOOK_SECONDS)


def _members_when_there(backend: Backend, deadline: float) -> list[dict[str, Any]]:
    """A registry that is starting is asked again."""
    while True:
        try:
            return _members(backend)
        except WaitTimeout:
            if time.monotonic() > deadline:
                raise
            time.sleep(LOOK_SECONDS)
