"""`expertwire chaos`: real servers under load, hurt by a plan; every result is checked."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ..client.client import Client
from ..errors import ConfigError, WaitTimeout
from ..hca.soft import SoftHca
from ..registry.question import ask
from .fleet import Fleet
from .load import LoadThread, Oracle
from .network import RETRY_EXCEEDED, Network, Relay, clear_data_faults, set_data_faults
from .picture import draw_chaos
from .plan import Phase, Plan
from .replies import tell
from .report import verdict
from .resources import Resources, cpu_ns

SETTLE_SECONDS = 90.0  # until all clients are connected to all servers again
LOOK_SECONDS = 0.02
STEADY_SECONDS = 1.0


@dataclass
class Event:
    """Something that was done, at a time of CLOCK_MONOTONIC."""

    ns: int
    kind: str
    server: str


@dataclass
class Lap:
    """One phase as it went."""

    phase: Phase
    begin_ns: int
    end_ns: int = 0
    late_ms: float = 0.0  # how late this process was woken, at worst: what the machine adds
    deadline_ms: float = 0.0  # the longest that a server would have been waited for
    steady_ns: int = 0  # a calm phase's first second is not steady: a new process computes slowly
    cpu_ns: tuple[int, int] = (0, 0)  # since then, of the servers that run, and of the twin's
    replies: tuple[int, int] = (0, 0)  # since then, to the clients, and to their twins


class ChaosRun:
    """One run of a plan."""

    def __init__(self, plan: Plan, model: str, out: Any = None):
        self.plan = plan
        self.model = model
        self.events: list[Event] = []
        self.laps: list[Lap] = []
        self.leaks: dict[str, int] = {}
        self.rss_growth_kb = 0
        self._out = out
        self._random = random.Random(plan.seed)
        self._shares = dict(plan.servers)
        self._running: set[str] = set()
        self._twins: Fleet | None = None

    def run(self) -> list[LoadThread]:
        """Runs the plan; the load threads, ended, with what they saw. Raises WaitTimeout if the
        system does not come together again."""
        gc.collect()
        before = Resources.of()
        loads: list[LoadThread] = []
        with self._one_core(), Fleet(self.model) as self.fleet, self._twin_fleet() as twins, \
                contextlib.ExitStack() as stack:
            # The fleet's warm process imports meanwhile.
            oracle = Oracle(self.model, rows=self.plan.rows, seed=self.plan.seed)
            self.fleet.start_registry()
            stack.callback(self._open_relay().close)
            self.fleet.start_servers(self.plan.servers)
            self._running = set(self.plan.servers)
            settings: dict[str, Any] = dict(reply_timeout=self.plan.reply_timeout,
                                            missing_timeout=30.0, signal_mode=self.plan.signal_mode)
            if twins is not None:
                settings["spin_us"] = 0.0  # see paired.py
            try:
                for i in range(self.plan.clients):
                    twin = None if twins is None else stack.enter_context(
                        Client(twins.address, token=twins.token, name=f"twin-{i}", **settings))
                    loads.append(LoadThread(f"client-{i}", self.fleet.way_in, self.fleet.token,
                                            oracle, twin, self.plan.seed + i, **settings))
                self._settle(loads)
                for load in loads:
                    if load.twin is not None:
                        load.twin.links.wait(lambda t: len(t.links) == len(self.plan.servers),
                                             SETTLE_SECONDS)
                    load.start()
                self._phases(loads)
            finally:
                for load in loads:
                    load.stop()
                self._say("stopping")
                for load in loads:
                    load.client.close()
            children = [child.process.pid for fleet in (self.fleet, twins) if fleet is not None
                        for child in fleet.children]
        self._count_leaks(before, children)
        for load in loads:
            if load.broken is not None:
                raise load.broken
        return loads

    @contextlib.contextmanager
    def _one_core(self) -> Generator[None]:
        """With a twin everything that is started shares one core (see paired.py)."""
        before = os.sched_getaffinity(0)
        if self.plan.twin:
            os.sched_setaffinity(0, {max(before)})
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    @contextlib.contextmanager
    def _twin_fleet(self) -> Generator[Fleet | None]:
        """The same system once more, if the plan wants one; nothing happens to it."""
        if not self.plan.twin:
            yield None
            return
        with Fleet(self.model, zygote=self.fleet.zygote) as twins:
            twins.start_registry()
            twins.start_servers(self.plan.servers)
            self._twins = twins
            yield twins

    def _open_relay(self) -> Relay:
        self.relay = Relay(self.fleet.address)
        self.fleet.way_in = self.relay.address
        return self.relay

    # ---------------------------------------------------------------- phases

    def _phases(self, loads: list[LoadThread]) -> None:
        calm: Resources | None = None
        servers: dict[int, Resources] = {}
        for i, phase in enumerate(self.plan.phases):
            self._say(f"{phase.name} ({sum(load.num_steps for load in loads)} steps)")
            lap = Lap(phase, time.monotonic_ns())
            self.laps.append(lap)
            drained = [name for kind, value in phase.actions
                       if (name := self._act(kind, value, loads)) and kind == "drain"]
            for load in loads:
                load.slow = phase.slow or 0.0
            if phase.network is not None:
                self._break_network(phase.network, loads)
            settling = min(STEADY_SECONDS, phase.seconds / 2) if phase.is_calm else 0.0
            self._load(settling, loads)
            lap.steady_ns, spent = time.monotonic_ns(), self._servers_cpu_ns()
            replies = _num_replies(loads)
            self._load(phase.seconds - settling, loads)
            if phase.network is not None:
                self._mend_network(phase.network, loads)
            if phase.returns:
                self._settle(loads)
            for name in drained:
                self._wait_gone(name)
            if i + 1 == len(self.plan.phases):
                while sum(load.num_steps for load in loads) < self.plan.min_steps:
                    self._load(0.1, loads)
            lap.end_ns = time.monotonic_ns()
            lap.replies = _minus(_num_replies(loads), replies)
            if not phase.starts_processes:  # what loading takes is no step's
                lap.cpu_ns = _minus(self._servers_cpu_ns(), spent)
            if calm is None:
                calm, servers = Resources.of(), self._server_resources()
        if calm is not None and self.plan.phases[-1].is_calm:
            self._compare(calm, servers, loads)

    def _act(self, kind: str, value: Any, loads: list[LoadThread]) -> str:
        """Does it; the name of whom it was done to."""
        name = value[0] if kind == "join" else value
        if name == "any":
            if not self._running:
                raise ConfigError(f"{kind} any: no server runs")
            name = self._random.choice(sorted(self._running))
        if kind == "join":
            self._shares[name] = value[1]
        self._note(kind, name)
        if kind in ("kill", "kill_registry"):
            self.fleet.kill(name)
        elif kind in ("stop", "continue"):
            self.fleet.signal(name, signal.SIGSTOP if kind == "stop" else signal.SIGCONT)
        elif kind in ("start", "join"):
            self.fleet.start_server(name, self._shares[name], wait=False)
        elif kind == "start_registry":
            self.fleet.start_registry()
        elif kind == "drain":
            ask(self.fleet.address, self.fleet.token, {"type": "drain", "server_id": name})
        elif kind == "error":
            for load in loads:
                _fail_next(load, name)
        if kind in ("kill", "stop", "drain"):
            self._running.discard(name)
        elif kind in ("start", "join", "continue"):
            self._running.add(name)
        return name

    def _break_network(self, network: Network, loads: list[LoadThread]) -> None:
        if network.way != "replies":
            for load in loads:
                set_data_faults(load, network, self._random.getrandbits(32))
        if network.way != "requests":
            for name in sorted(self._running):
                tell(self.fleet.servers[name], network, self._random.getrandbits(32))
        if network.control == "hang-up":
            self.relay.hang_up()
        else:
            self.relay.control = network.control
        for name in {*network.cut, *network.hang}:
            self._note("cut", name)

    def _mend_network(self, network: Network, loads: list[LoadThread]) -> None:
        self.relay.control = ""
        for load in loads:
            clear_data_faults(load)
        for name in self._running:
            tell(self.fleet.servers[name], None)
        for name in {*network.cut, *network.hang}:
            self._note("mended", name)

    def _load(self, seconds: float, loads: list[LoadThread]) -> None:
        """Lets the clients work."""
        end = time.monotonic() + seconds
        lap = self.laps[-1]
        lap.deadline_ms = max(lap.deadline_ms, *(load.deadline_ms() for load in loads))
        while (left := end - time.monotonic()) > 0:
            asleep, asked = time.monotonic(), min(left, LOOK_SECONDS)
            time.sleep(asked)
            late_ms = (time.monotonic() - asleep - asked) * 1e3
            lap.late_ms = max(lap.late_ms, late_ms)
            lap.deadline_ms = max(lap.deadline_ms, *(load.deadline_ms() for load in loads))
            self._check_alive(loads)
            if lap.phase.network is None or not lap.phase.network.loses_servers:
                self._note_ready(loads)

    def _settle(self, loads: list[LoadThread]) -> None:
        """Until every client is connected to every server that runs."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while not all(load.connected() == self._running for load in loads):
            self._check_alive(loads)
            if time.monotonic() > deadline:
                seen = {load.name: sorted(load.connected()) for load in loads}
                raise WaitTimeout(
                    f"after {SETTLE_SECONDS:.0f} s not every client is connected to "
                    f"{sorted(self._running)}: {seen}", "settle", expected=sorted(self._running),
                    seen=seen,
                )
            time.sleep(LOOK_SECONDS)
        self._note_ready(loads)

    def _note_ready(self, loads: list[LoadThread]) -> None:
        """Servers that every client is connected to, once after whatever happened to them."""
        last = {event.server: event.kind for event in self.events}
        for name in self._running.intersection(*(load.connected() for load in loads)):
            if last.get(name) != "ready":
                self._note("ready", name)

    def _check_alive(self, loads: list[LoadThread]) -> None:
        for load in loads:
            if load.broken is not None:
                raise load.broken
        for name in self._running:
            child = self.fleet.servers[name]
            if child.process.poll() is not None:
                raise ConfigError(f"server {name} ended by itself, exit code "
                                  f"{child.process.returncode}: {' | '.join(child.lines[-5:])}")

    def _wait_gone(self, name: str) -> None:
        code = self.fleet.servers[name].process.wait(SETTLE_SECONDS)
        if code != 0:
            raise ConfigError(f"drained server {name} ended with exit code {code}, not 0")
        self.fleet.forget(name)
        self._note("left", name)

    def _servers_cpu_ns(self) -> tuple[int, int]:
        """Processor time of the servers that run, and of the twin's."""
        if self._twins is None:
            return 0, 0
        return (sum(cpu_ns(self.fleet.servers[name].process.pid) for name in self._running),
                sum(cpu_ns(child.process.pid) for child in self._twins.servers.values()))

    # ---------------------------------------------------------------- leaks

    def _server_resources(self) -> dict[int, Resources]:
        pids = [self.fleet.servers[name].process.pid for name in self._running]
        if self.fleet.registry is not None:
            pids.append(self.fleet.registry.process.pid)
        return {pid: Resources.of(pid) for pid in pids}

    def _compare(
        self, calm: Resources, servers: dict[int, Resources], loads: list[LoadThread]
    ) -> None:
        """The last phase against the first: same servers connected, so nothing may be more."""
        if any(load.connected() != set(self.plan.servers) for load in loads):
            return  # other servers than at the start
        end, now = time.monotonic() + 3, Resources.of()
        while any(now.growth(calm).values()) and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
            now = Resources.of()
        self.rss_growth_kb = now.rss_kb - calm.rss_kb
        for name, count in now.growth(calm).items():
            self.leaks[f"running: {name}"] = count
        for pid, resources in self._server_resources().items():
            if pid in servers:  # it was not restarted
                for name, count in resources.growth(servers[pid]).items():
                    self.leaks[f"servers: {name}"] = self.leaks.get(f"servers: {name}", 0) + count

    def _count_leaks(self, before: Resources, children: list[int]) -> None:
        end = time.monotonic() + 3
        gc.collect()
        while any(Resources.of().growth(before).values()) and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
        for name, count in Resources.of().growth(before).items():
            self.leaks[f"after: {name}"] = count
        self.leaks["after: processes"] = sum(Path(f"/proc/{pid}").exists() for pid in set(children))

    def _note(self, kind: str, server: str) -> None:
        self.events.append(Event(time.monotonic_ns(), kind, server))

    def _say(self, text: str) -> None:
        if self._out is not None:
            print(text, file=self._out, flush=True)


def _num_replies(loads: list[LoadThread]) -> tuple[int, int]:
    counts = [load.num_replies() for load in loads]
    return sum(client for client, _ in counts), sum(twin for _, twin in counts)


def _minus(these: tuple[int, int], those: tuple[int, int]) -> tuple[int, int]:
    return these[0] - those[0], these[1] - those[1]


def _fail_next(load: LoadThread, server: str) -> None:
    """The client's next work-queue entry to the server completes with an error (fault injector)."""
    link = next((link for link in load.client.links.table.links if link.server_id == server), None)
    if link is None:
        raise ConfigError(f"{load.name} is not connected to {server}")
    qpns = {state.qpn for state in link.endpoint.qp_states}
    done = threading.Event()

    def hook(_context, qpn: int, _idx, _wqe, _bytes) -> int:
        if done.is_set() or qpn not in qpns:
            return 0
        done.set()
        return RETRY_EXCEEDED

    cast(SoftHca, load.client.hca).set_hook(hook)


def run_chaos(
    plan: Plan, *, model: str | None = None, picture: str | None = None, quiet: bool = False
) -> dict[str, Any]:
    """Runs a plan and returns its verdict (report.py); draws the timeline."""
    from ..demo import demo_model_path

    out = None if quiet else sys.stderr
    if out is not None:
        print(f"{plan.name}: {plan.about}", file=out, flush=True)
    run = ChaosRun(plan, model or demo_model_path(), out)
    start = time.monotonic()
    loads = run.run()
    result = {"plan": plan.name, "seconds": round(time.monotonic() - start, 1),
              **verdict(run, loads)}
    if picture:
        try:
            draw_chaos(picture, run, loads, result)
            result["picture"] = os.path.abspath(picture)
        except OSError as err:
            print(f"expertwire: no picture: {err}; choose another --picture", file=sys.stderr)
    return result
