"""Which experts a new server should hold."""

from __future__ import annotations

from collections.abc import Sequence, Set


def plan_experts(
    num_experts: int, held: Sequence[Set[int]], num_servers: int | None = None
) -> list[int]:
    """Experts for one more server, given what the others hold.

    With num_servers, each server takes a share of ceil or floor(num_experts / num_servers), and
    the shares of num_servers servers cover every expert. Without it, a new server takes what
    nobody holds, or, when all are held, an equal share of those with the fewest holders.
    """
    holders = [sum(expert in share for share in held) for expert in range(num_experts)]
    missing = [expert for expert in range(num_experts) if holders[expert] == 0]
    if num_servers:
        idx = len(held) % num_servers
        size = num_experts * (idx + 1) // num_servers - num_experts * idx // num_servers
    elif missing:
        return missing
    else:
        size = max(1, num_experts // (len(held) + 1))
    ranked = sorted(range(num_experts), key=lambda expert: (holders[expert], expert))
    return sorted(ranked[: max(1, size)])
