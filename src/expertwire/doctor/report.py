"""All checks, side by side and in under five seconds, and what they say about each path."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

from . import fabric, gpu, host
from .findings import Finding, Probe, Roots, run_checks

SECONDS = 4.0  # the interpreter's start comes on top
PATHS = ("cpu", "gpu", "nvlink", "ucx", "mlx5")


def examine(roots: Roots | None = None, seconds: float = SECONDS) -> list[Finding]:
    """Every finding, path by path. Takes at most about `seconds`."""
    roots = roots or Roots()
    deadline = time.monotonic() + seconds
    probes = {"job": Probe("job"), "ucx": Probe("ucx"), "gpu": Probe("gpu", f"{0.7 * seconds}")}

    def verbs(device: str) -> dict[str, Any]:
        return Probe("verbs", device).result(deadline - 0.2)

    @functools.cache
    def probed(name: str) -> dict[str, Any]:
        return probes[name].result(deadline - 0.1)

    found = run_checks({
        "cpu packages": host.packages, "cpu work queue": host.work_queue,
        "cpu sockets": host.sockets, "cpu token": host.token,
        "cpu limits": lambda: host.limits(roots),
        "mlx5 adapter": lambda: fabric.mlx5_findings(roots, verbs),
    }, deadline)
    found += gpu.gpu_findings(probed("gpu"), roots, gpu.torch_cuda_version())
    found += gpu.nvlink_findings(probed("gpu"))
    found += fabric.ucx_findings(probed("ucx"))
    found.append(job_finding(probed("job")))  # the longest, so the last that is waited for
    return sorted(found, key=lambda f: PATHS.index(f.path))


def job_finding(facts: dict[str, Any]) -> Finding:
    """A registry, a server and a client, as the main job has them."""
    name = "whole trip"
    if facts.get("late"):
        return Finding("cpu", name, "unknown", "importing torch and a trip took too long for this "
                       "check; that alone breaks nothing", "expertwire doctor --seconds 30")
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
        elif vague is not None and not any(f.state == "ok" for f in mine if f.name != vague.name):
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


def can_run(states: dict[str, dict[str, str]], needed: str) -> bool:
    """Whether the job can run: the needed path and, for every path, that of the CPU."""
    return states["cpu"]["state"] == "works" and states[needed]["state"] == "works"
