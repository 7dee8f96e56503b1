"""Which experts a new server should hold."""

from __future__ import annotations

from collections.abc import Sequence, Set


def plan_experts(
    num_experts: int, held: Sequence[Set[int]], num_servers: int | None = None
) -> list[int]:
    """Experts (sorted ids) for one more server, given what the others hold.

    With num_servers, a server takes its share of what nobody holds yet, so that num_servers
    servers together cover every expert, and shares differ by at most one. Without it, a new server
    takes everything that nobody holds. When all are held, it takes an equal share of those with
    the fewest holders. Never empty.
    """
    holders = [0] * num_experts
    for share in held:
        for expert in share:
            if 0 <= expert < num_experts:
                holders[expert] += 1
    missing = [expert for expert in range(num_experts) if holders[expert] == 0]
    if missing:
        to_come = max(1, num_servers - len(held)) if num_servers else 1
        return missing[: -(-len(missing) // to_come)]
    size = max(1, num_experts // (num_servers or len(held) + 1))
    ranked = sorted(range(num_experts), key=lambda expert: (holders[expert], expert))
    return sorted(ranked[:size])
