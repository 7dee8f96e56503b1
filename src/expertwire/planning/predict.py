"""`expertwire plan`: how many expert servers, which replicas, how long a step takes, and its limit.

Formulas and their sources: docs/planning.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import ConfigError
from ..registry.rebalance import num_replicas
from .costs import HEAD_BYTES, Costs, busy_experts

BUSY_ENOUGH = 0.7  # of a server's time: beyond it waiting grows quickly
WORTH_IT = 0.05  # more servers are recommended while each doubling saves so much of a step


@dataclass(frozen=True)
class Workload:
    """A model and what is asked of it. Bytes per element: of the messages and of the weights."""

    num_layers: int
    num_experts: int
    top_k: int
    hidden_size: int
    middle_size: int
    tokens: int  # per step and client
    clients: int = 1
    element_bytes: int = 2
    weight_bytes: int = 2
    attention_us: float = 0.0  # of a client per layer, between its MoE layers
    batch_invariant: bool = True

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0 if name in ("attention_us", "batch_invariant") else 1
            if not math.isfinite(value) or value < least:
                raise ConfigError(f"{name} must be at least {least}, not {value}")
        if self.top_k > self.num_experts:
            raise ConfigError(f"top-{self.top_k} of {self.num_experts} experts")

    @property
    def expert_bytes(self) -> int:
        """Weights of one expert of one layer: gate, up and down."""
        return 3 * self.hidden_size * self.middle_size * self.weight_bytes

    @property
    def pair_flops(self) -> int:
        """Of one row in one expert: a multiplication and an addition per weight."""
        return 6 * self.hidden_size * self.middle_size


@dataclass(frozen=True)
class Prediction:
    """A step of one client, all layers. Times in us, per layer where it says so."""

    servers: int
    rows: float  # tokens that a message carries
    pairs: float  # (token, expert) pairs of a message
    message_bytes: float  # there and back
    trip_us: float  # per layer: put to combine without the experts
    experts_us: float  # per layer: of the busiest server's batch
    layer_us: float  # of a client: attention, trip, experts with the other clients' rows
    apart_us: float  # the same if clients come at random and are served one by one
    step_us: float
    busy: float  # share of its time that the busiest server works
    saturates_at: float  # clients beyond which throughput hardly grows
    weight_bytes: int  # that a server holds, all layers
    bound_by: str


def rows_per_server(work: Workload, servers: int) -> float:
    """Tokens with at least one of their experts at a given server, experts spread evenly."""
    share = work.num_experts / servers
    none = 1.0
    for i in range(work.top_k):  # none of top_k different experts is among the server's
        none *= max(0.0, work.num_experts - share - i) / (work.num_experts - i)
    return work.tokens * (1 - none)


def message_bytes(work: Workload, rows: float, pairs: float) -> float:
    """Of a request and its reply (docs/wire.md)."""
    request = rows * (work.hidden_size * work.element_bytes + 8 * work.top_k)
    reply = (pairs if work.batch_invariant else rows) * work.hidden_size * work.element_bytes
    return HEAD_BYTES + request + reply


def predict(work: Workload, servers: int, costs: Costs, imbalance: float = 1.0) -> Prediction:
    """Expected times with `servers` equal servers. imbalance: the busiest server's load over the
    mean. Raises ConfigError for more servers than experts."""
    if not 1 <= servers <= work.num_experts:
        raise ConfigError(f"{servers} servers for {work.num_experts} experts")
    held = work.num_experts / servers
    rows = rows_per_server(work, servers)
    pairs = work.tokens * work.top_k / servers * imbalance
    count = message_bytes(work, rows, pairs)
    chance = work.top_k / work.num_experts
    fixed = min(costs.server_us, costs.trip_us)  # the server's part of a trip
    slower = costs.shared(servers)
    # A message's time on its way. All of a client's pass through its own memory and link, and all
    # clients' messages for a server through the server's: the longer of both counts.
    passing = count / costs.trip_bytes_per_us
    own, behind = servers * passing, max(0, work.clients - servers) * passing

    def served_us(clients: float) -> float:
        """Of a batch with the messages of so many clients."""
        busy = busy_experts(held, chance, work.tokens * clients)
        return slower * (fixed + costs.experts_us(busy, pairs * clients, work.expert_bytes,
                                                  work.pair_flops))

    alone, together = served_us(1), served_us(work.clients)
    client = work.attention_us + costs.trip_us - fixed + own
    think = costs.shared(work.clients) * client
    # What one more of many clients adds, times a million: it may share the CPUs with the others.
    another = served_us(2e6) - served_us(1e6) + 1e6 * (
        passing + client / (costs.cores * costs.parallel))
    layer = think + behind + together
    trip = costs.trip_us + own
    busy = busy_experts(held, chance, work.tokens)
    limits = {"experts' weights": busy * work.expert_bytes / costs.weight_bytes_per_us,
              "experts' arithmetic": pairs * work.pair_flops / costs.flops_per_us,
              "bytes on the way": own + behind,
              "fixed costs": costs.trip_us + costs.batch_us + busy * costs.expert_us,
              "attention": work.attention_us, "other clients' rows": together - alone}
    return Prediction(
        servers=servers, rows=rows, pairs=pairs, message_bytes=count, trip_us=trip,
        experts_us=alone - slower * fixed, layer_us=layer,
        apart_us=think - passing + waiting(alone + passing, think - passing, work.clients),
        step_us=layer * work.num_layers, busy=(together + behind) / layer,
        saturates_at=(client + alone) / (another / 1e6),
        weight_bytes=math.ceil(held) * work.expert_bytes * work.num_layers,
        bound_by=max(limits, key=lambda name: limits[name]),
    )


def waiting(demand: float, think: float, clients: int) -> float:
    """Time at a server, waiting included, when `clients` come, are served for `demand`, and come
    again after `think`: exact mean value analysis of one queue."""
    queue = response = 0.0
    for n in range(1, clients + 1):
        response = demand * (1 + queue)
        queue = n * response / (think + response)
    return response


def recommend(
    work: Workload, costs: Costs, *, memory_bytes: float = math.inf, imbalance: float = 1.0,
    most: int | None = None,
) -> tuple[Prediction, list[Prediction]]:
    """The fewest servers that are not too busy, and all that were looked at.

    Powers of two up to the number of experts, and what the memory of a server asks for at least.
    Raises ConfigError if an expert alone does not fit.
    """
    one = work.expert_bytes * work.num_layers
    if one > memory_bytes:
        raise ConfigError(f"an expert takes {one / 1e9:.3g} GB over all layers, a server has "
                          f"{memory_bytes / 1e9:.3g} GB")
    held = work.num_experts if math.isinf(memory_bytes) else int(memory_bytes // one)
    least = -(-work.num_experts // min(held, work.num_experts))
    limit = min(most or work.num_experts, work.num_experts)
    if least > limit:
        raise ConfigError(f"at least {least} servers are needed for the memory, {limit} are there")
    counts = sorted({least, limit, *(2**i for i in range(20) if least <= 2**i <= limit)})
    all_of_them = [predict(work, count, costs, imbalance) for count in counts]
    chosen = all_of_them[0]
    for candidate in all_of_them[1:]:
        saved = 1 - candidate.step_us / chosen.step_us
        queued = work.clients > 1 and chosen.busy > BUSY_ENOUGH  # one client waits for nobody
        if saved > WORTH_IT or (queued and saved > 0):
            chosen = candidate
    return chosen, all_of_them


def zipf_loads(num_experts: int, skew: float) -> list[float]:
    """Shares of the load if the r-th busiest expert gets 1 / r^skew; 0: all the same."""
    weights = [(rank + 1) ** -skew for rank in range(num_experts)]
    return [weight / sum(weights) for weight in weights]


def replicas(loads: Sequence[float], servers: int, spare: float) -> tuple[dict[int, int], float]:
    """Replicas for hot experts, if servers have room for `spare` more than one of each.

    Returns ({expert: how many servers hold it} for those with more than one, the busiest server's
    load over the mean when the heaviest are placed first).
    """
    places = max(len(loads), round(len(loads) * (1 + spare)))
    counts = num_replicas(loads, places, servers)
    parts = sorted((load / count for load, count in zip(loads, counts, strict=True)
                    for _ in range(count)), reverse=True)
    filled, room = [0.0] * servers, [-(-places // servers)] * servers
    for part in parts:
        place = min((s for s in range(servers) if room[s]), key=lambda s: filled[s])
        filled[place] += part
        room[place] -= 1
    mean = sum(filled) / servers
    hot = {expert: count for expert, count in enumerate(counts) if count > 1}
    return hot, max(filled) / mean if mean else 1.0


def as_dict(prediction: Prediction) -> dict[str, Any]:
    return {key: round(value, 4) if isinstance(value, float) else value
            for key, value in asdict(prediction).items()}
