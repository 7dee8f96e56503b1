"""All checks, side by side and in under five seconds, and what they say about each path."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import fabric, gpu, host
from .findings import MORE_TIME, Finding, Probe, Roots, run_checks

SECONDS = 4.5  # from the start of the process; its end comes on top
LEAST = 0.5  # for the checks, however long the start took
PATHS = ("cpu", "gpu", "nvlink", "ucx", "mlx5")


def process_age() -> float:
    """Seconds since this process was started, the interpreter's start included."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def examine(roots: Roots | None = None, seconds: float = SECONDS) -> list[Finding]:
    """Every finding, path by path. Takes at most about `seconds`."""
    roots = roots or Roots()
    deadline = time.monotonic() + seconds
    probes = {"job": Probe("job"), "ucx": Probe("ucx"), "gpu": Probe("gpu", f"{0.7 * seconds}")}

    def verbs(device: str) -> dict[str, Any]:
        probe = probes[f"verbs {device}"] = Probe("verbs", device)
        return probe.result(deadline - 0.2)

    def gpus() -> list[Finding]:
        facts = probes["gpu"].result(deadline - 0.2)
        if facts.get("late") and not gpu.is_there(roots):  # it had not even started
            facts = {"no_driver": "no card and no driver"}
        return [*gpu.gpu_findings(facts, roots, gpu.torch_cuda_version()),
                *gpu.nvlink_findings(facts)]

    try:
        found = run_checks({
            "cpu packages": host.packages, "cpu work queue": host.work_queue,
            "cpu sockets": host.sockets, "cpu token": host.token,
            "cpu limits": lambda: host.limits(roots),
            "cpu whole trip": lambda: [job_finding(probes["job"].result(deadline - 0.2))],
            "gpu driver": gpus,
            "ucx library": lambda: fabric.ucx_findings(probes["ucx"].result(deadline - 0.2)),
            "mlx5 adapter": lambda: fabric.mlx5_findings(roots, verbs),
        }, deadline)
    finally:
        for probe in list(probes.values()):
            probe.kill()
    paths = {f.path for f in found}
    found += [Finding(path, "checks", "unknown", "not found out in time", MORE_TIME)
              for path in PATHS if path not in paths]
    return sorted(found, key=lambda f: PATHS.index(f.path))


def job_finding(facts: dict[str, Any]) -> Finding:
    """A registry, a server and a client, as the main job has them."""
    name = "whole trip"
    if facts.get("late"):
        return Finding("cpu", name, "unknown", "not found out in time; it had come to: "
                       f"{facts.get('reached', 'starting the interpreter')}", MORE_TIME)
    if "error" in facts:
        return Finding("cpu", name, "fail", facts["error"], "expertwire demo (it says more)")
    if not facts["equal"]:
        return Finding("cpu", name, "fail", "rows came back with other bits than they left with",
                       "memtest: this is a fault of the machine, or of expertwire")
    return Finding("cpu", name, "ok", f"client, server and registry with torch {facts['torch']}: "
                   f"a batch there and back in {facts['us']} us")


def path_states(found: Sequence[Finding]) -> dict[str, dict[str, str]]:
    """{path: {state, why, fix}}: works, no, absent or unknown; why not, from the first that says.

    nvlink and ucx stand on others: without a GPU there is no link between GPUs.
    """
    states = {}
    for path in PATHS:
        mine = [f for f in found if f.path == path]
        worst = next((f for state in ("fail", "absent") for f in mine if f.state == state), None)
        vague = next((f for f in mine if f.state == "unknown"), None)
        if worst is not None:
            state = "no" if worst.state == "fail" else "absent"
            states[path] = {"state": state, "why": f"{worst.name}: {worst.text}", "fix": worst.fix}
        elif vague is not None:
            states[path] = {"state": "unknown", "why": f"{vague.name}: {vague.text}",
                            "fix": vague.fix}
        else:
            states[path] = {"state": "works", "why": "", "fix": ""}
    return states


MARKS = {"ok": "ok", "warn": "!", "fail": "NO", "unknown": "?", "absent": "-"}


def report_lines(found: Sequence[Finding]) -> list[str]:
    """Findings, then one line for each path. Plain text."""
    lines = []
    width = max(len(f.name) for f in found)
    for path in PATHS:
        for f in [f for f in found if f.path == path]:
            lines.append(f"{path:<7}{MARKS[f.state]:<3}{f.name:<{width}}  {f.text}")
            if f.fix and f.state != "ok":
                lines.append(f"{'':<10}{'':<{width}}  -> {f.fix}")
    lines.append("")
    for path, facts in path_states(found).items():
        why = f" ({facts['why']})" if facts["why"] else ""
        lines.append(f"{path}: {facts['state']}{why}")
    return lines


def as_dict(found: Sequence[Finding], needed: str, seconds: float) -> dict[str, Any]:
    states = path_states(found)
    return {
        "can_run": can_run(states, needed), "needed": needed, "seconds": round(seconds, 2),
        "paths": states,
        "findings": [{"path": f.path, "name": f.name, "state": f.state, "text": f.text,
                      "fix": f.fix} for f in found],
    }


def can_run(states: dict[str, dict[str, str]], needed: str) -> bool | None:
    """Whether the job can run: the needed path and, for every path, that of the CPU.

    None: nothing is known to be wrong, and not everything was found out in time.
    """
    both = {states["cpu"]["state"], states[needed]["state"]}
    return True if both == {"works"} else None if both <= {"works", "unknown"} else False
