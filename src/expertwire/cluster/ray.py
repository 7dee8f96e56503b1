"""`--on ray`: one actor for the registry and for each server, placed and restarted by Ray.

Everything that is needed to find a cluster again is in Ray: actors are detached and have names.
Nothing of the data path goes through Ray, and a server that serves does not notice if Ray ends.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

from ..control.channel import format_address, parse_address
from ..control.credentials import load_token
from ..errors import ConfigError, ExpertwireError, WaitTimeout
from .actor import CommandActor, Secret
from .arguments import REGISTRY, server_index, server_name
from .backend import RESTARTING, STARTING, ProcessFacts
from .config import ClusterConfig

try:
    import ray
    import ray.exceptions
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import (
        NodeAffinitySchedulingStrategy,
        PlacementGroupSchedulingStrategy,
    )
except ImportError as err:
    raise ConfigError(
        f"--on ray needs Ray ({err}): pip install 'expertwire[ray]', here and on every node"
    ) from None

NAMESPACE = "expertwire"
ANSWER_SECONDS = 5.0  # of an actor; longer means that it restarts or waits for a place
STOP_SECONDS = 15.0
REGISTRY_PORT = 7700
STRATEGIES = {"spread": "SPREAD", "pack": "DEFAULT"}  # DEFAULT fills a node before the next


class RayBackend:
    """Connects this process to the Ray cluster that the configuration names."""

    def __init__(self, config: ClusterConfig):
        self.config = config
        if not isinstance(config.servers.device, str):
            raise ConfigError("servers.device: on Ray it is one device (cpu or cuda): Ray gives "
                              "each server GPUs of its own")
        if not ray.is_initialized():
            try:
                ray.init(address=config.ray.address, namespace=NAMESPACE, log_to_driver=False,
                         logging_level=logging.ERROR)
            except (ConnectionError, RuntimeError, ValueError) as err:
                raise ConfigError(f"no Ray cluster at {config.ray.address!r}: {err}; `ray start "
                                  "--head` starts one, and `expertwire down "
                                  f"{config.name} --forget` drops one that is gone") from None

    # ---------------------------------------------------------------- the backend's methods

    def start(self) -> None:
        if self._names():
            raise ConfigError(f"cluster {self.config.name} is up already on this Ray cluster; "
                              "`expertwire down` ends it")
        listen = self.config.registry.address or self._start_registry()
        if self.config.ray.placement.startswith("strict"):
            self._make_places()
        count = self.config.servers.count
        for index in range(count):
            self._start_server(server_name(index), listen, count)

    def registry_address(self) -> str:
        if self.config.registry.address:
            return self.config.registry.address
        return _listen_address(self.config, self._head()["NodeManagerAddress"])

    def describe(self) -> list[ProcessFacts]:
        actors = {name: self._actor(name) for name in self._names()}
        asked = {name: actor.describe.remote() for name, actor in actors.items()}
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_SECONDS) \
            if asked else None
        return [self._facts(name, asked[name], actors[name]) for name in sorted(
            asked, key=server_index)]

    def add(self, names: Sequence[str], num_servers: int) -> None:
        places = self._num_places()
        if places is not None and num_servers > places:
            raise ConfigError(
                f"{num_servers} servers: placement {self.config.ray.placement} keeps places for "
                f"{places}; set ray.places, then `expertwire down` and `up`"
            )
        for name in names:
            self._start_server(name, self.registry_address(), num_servers)

    def remove(self, name: str) -> None:
        if name in self._names():
            self._end([name])

    def log(self, name: str, lines: int) -> list[str]:
        if name not in self._names():
            raise ConfigError(f"no process {name!r}; there are {', '.join(self._names())}")
        try:
            return ray.get(self._actor(name).log.remote(lines), timeout=ANSWER_SECONDS)
        except (ray.exceptions.RayError, TimeoutError) as err:
            raise ExpertwireError(f"{name} does not answer now: {type(err).__name__}") from None

    def stop(self) -> None:
        self._end(self._names())
        with contextlib.suppress(ValueError):
            remove_placement_group(ray.util.get_placement_group(self._full("places")))

    # ---------------------------------------------------------------- actors

    def _full(self, name: str) -> str:
        return f"{self.config.name}/{name}"

    def _names(self) -> list[str]:
        """Actors of this cluster that run, or that Ray is about to start or to restart."""
        prefix = self._full("")
        found = [n["name"] for n in ray.util.list_named_actors(all_namespaces=True)
                 if n["namespace"] == NAMESPACE]
        names = [n.removeprefix(prefix) for n in found if n.startswith(prefix)]
        return sorted(names, key=server_index)

    def _actor(self, name: str) -> Any:
        return ray.get_actor(self._full(name), namespace=NAMESPACE)

    def _start(self, name: str, registry: str, num_servers: int, **options: Any) -> None:
        secret = None if self.config.token_file else Secret(load_token().decode())
        ray.remote(CommandActor).options(
            name=self._full(name), namespace=NAMESPACE, lifetime="detached",
            # Of calls in flight: `describe` and `log` are answered while `stop` waits.
            max_concurrency=4, max_task_retries=0, **options,
        ).remote(self.config.as_dict(), name, registry, secret, num_servers)

    def _start_registry(self) -> str:
        """On the head node, so that its address stays: without that node there is no Ray either."""
        head = self._head()
        address = _listen_address(self.config, head["NodeManagerAddress"])
        self._start(
            REGISTRY, address, 0, num_cpus=0, max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(head["NodeID"], soft=False),
        )
        return address

    def _start_server(self, name: str, registry: str, num_servers: int) -> None:
        wants = self.config.ray
        strategy: Any = STRATEGIES.get(wants.placement)
        if strategy is None:
            strategy = PlacementGroupSchedulingStrategy(
                ray.util.get_placement_group(self._full("places")))
        self._start(
            name, registry, num_servers, num_cpus=wants.cpus, num_gpus=self._gpus(),
            memory=int(wants.memory_gb * 1e9), resources=wants.resources or None,
            scheduling_strategy=strategy, max_restarts=self.config.servers.max_restarts,
        )

    def _end(self, names: list[str]) -> None:
        """Asks the commands to end, then takes the actors away for good."""
        actors = {}
        for name in names:
            with contextlib.suppress(ValueError):  # it has gone meanwhile
                actors[name] = self._actor(name)
        asked = [actor.stop.remote() for actor in actors.values()]
        if asked:  # one that waits for a place has nothing to end, and cannot answer
            ray.wait(asked, num_returns=len(asked), timeout=ANSWER_SECONDS)
        for actor in actors.values():
            ray.kill(actor, no_restart=True)
        deadline = time.monotonic() + STOP_SECONDS
        while set(self._names()) & set(actors):
            if time.monotonic() > deadline:
                raise WaitTimeout(f"Ray still lists {', '.join(self._names())} of cluster "
                                  f"{self.config.name}", "down", self.config.name)
            time.sleep(0.05)

    def _facts(self, name: str, answer: Any, actor: Any) -> ProcessFacts:
        log = f"ray logs actor --id {actor._actor_id.hex()}"
        try:
            facts = ray.get(answer, timeout=0.01)
        except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as err:
            return ProcessFacts(name, RESTARTING, "", None, None, _one_line(err), log)
        except TimeoutError:
            return ProcessFacts(name, STARTING, "", None, 0, "waits for a place on a node", log)
        return ProcessFacts(name, facts["state"], facts["node"], facts["pid"],
                            None if facts["restarted"] else 0, facts["said"], log)

    # ---------------------------------------------------------------- nodes and places

    def _head(self) -> dict[str, Any]:
        for node in ray.nodes():
            if node["Alive"] and "node:__internal_head__" in node["Resources"]:
                return node
        raise ExpertwireError("Ray lists no head node that is alive")

    def _gpus(self) -> float:
        on_gpu = self.config.servers.device != "cpu"
        return float(on_gpu) if self.config.ray.gpus is None else self.config.ray.gpus

    def _num_places(self) -> int | None:
        wants = self.config.ray
        if not wants.placement.startswith("strict"):
            return None
        return wants.places or self.config.servers.count

    def _make_places(self) -> None:
        """Reserves what all servers need, on distinct nodes or on one; Ray moves a place whose
        node is lost."""
        wants = self.config.ray
        bundle = {"CPU": wants.cpus, "GPU": self._gpus(), "memory": wants.memory_gb * 1e9,
                  **wants.resources}
        bundle = {name: amount for name, amount in bundle.items() if amount}
        places = placement_group(
            [bundle] * (self._num_places() or 1), strategy=wants.placement.upper(),
            name=self._full("places"), lifetime="detached",
        )
        if not places.wait(timeout_seconds=ANSWER_SECONDS):
            remove_placement_group(places)
            raise ConfigError(
                f"placement {wants.placement}: Ray has no room for {self._num_places()} places of "
                f"{bundle}; `ray status` shows the nodes"
            )


def _listen_address(config: ClusterConfig, node: str) -> str:
    """Of the registry. Raises ConfigError for port 0: it could not be found again."""
    address = config.registry.listen or format_address(node, REGISTRY_PORT)
    if parse_address(address)[1] == 0:
        raise ConfigError("registry.listen: on Ray it needs a port of its own, not 0")
    return address


def _one_line(err: Exception) -> str:
    return str(err).strip().splitlines()[0][:200]
