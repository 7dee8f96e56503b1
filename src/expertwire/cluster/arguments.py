"""The `expertwire` commands that a cluster's processes run, and what their environment holds."""

from __future__ import annotations

import math
import re

from .config import ClusterConfig

SERVER = re.compile(r"server-(\d+)")
REGISTRY = "registry"


def server_name(index: int) -> str:
    return f"server-{index}"


def server_index(name: str) -> int:
    """-1 for what is no server of a cluster."""
    match = SERVER.fullmatch(name)
    return int(match[1]) if match else -1


def free_names(taken: list[str], count: int) -> list[str]:
    """Names for `count` more servers: the lowest numbers that are not in use."""
    used = {server_index(name) for name in taken}
    free = [i for i in range(len(used) + count) if i not in used]
    return [server_name(i) for i in free[:count]]


def registry_arguments(config: ClusterConfig, listen: str, state: str | None = None) -> list[str]:
    """state: file that keeps the epoch, on a host where it outlives the process."""
    arguments = ["registry", "--listen", listen, "--lease", f"{config.registry.lease:g}"]
    return arguments + (["--state", state] if state else [])


def server_arguments(
    config: ClusterConfig, name: str, registry: str, num_servers: int
) -> list[str]:
    """registry: its address. num_servers: how many the cluster has in all, for `experts: auto`."""
    servers, index = config.servers, server_index(name)
    experts, device = servers.experts, servers.device
    if not isinstance(experts, str):  # of servers that came later: what is held least
        experts = experts[index] if index < len(experts) else "auto"
    if not isinstance(device, str):
        device = device[index % len(device)]
    arguments = ["serve", config.model, "--experts", experts, "--registry", registry,
                 "--name", name, "--device", device]
    if experts == "auto":
        arguments += ["--of", str(math.ceil(num_servers / servers.replicas))]
    for option, value in (("--dtype", servers.dtype), ("--threads", servers.threads),
                          ("--room", servers.room)):
        if value is not None:
            arguments += [option, str(value)]
    if servers.hca != "soft":
        arguments += ["--hca", servers.hca]
    if not servers.batch_invariant:
        arguments.append("--no-batch-invariant")
    return arguments


def environment(config: ClusterConfig, token: str | None) -> dict[str, str]:
    """Variables on top of those of the parent. The secret is in the environment, never among the
    arguments: those are for everybody to read."""
    secret = {"EXPERTWIRE_TOKEN": token} if token else {}
    if config.token_file:
        secret = {"EXPERTWIRE_TOKEN_FILE": config.token_file, "EXPERTWIRE_TOKEN": ""}
    return {**config.env, **secret}
