"""Which server serves which expert, as one immutable table that a batch is routed by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .link import ServerLink


class RoutingTable:
    """expert -> servers, for the servers that a client is connected to.

    links: the servers, ordered by id, so that every client numbers them the same way.
    expert_servers: int32 [num_experts, max_replicas], index into links, -1 ends a row.
    """

    def __init__(self, epoch: int, num_experts: int, links: Iterable[ServerLink]):
        self.epoch = epoch
        self.num_experts = num_experts
        self.links: Sequence[ServerLink] = sorted(links, key=lambda link: link.server_id)
        holders: list[list[int]] = [[] for _ in range(num_experts)]
        leaving: list[list[int]] = [[] for _ in range(num_experts)]  # only where nobody stays
        for idx, link in enumerate(self.links):
            for expert in link.experts:
                if 0 <= expert < num_experts:
                    (leaving if link.draining else holders)[expert].append(idx)
        holders = [stay or leave for stay, leave in zip(holders, leaving, strict=True)]
        self.max_replicas = max(1, max((len(h) for h in holders), default=1))
        self.expert_servers = np.full((max(num_experts, 1), self.max_replicas), -1, np.int32)
        for expert, servers in enumerate(holders):
            self.expert_servers[expert, : len(servers)] = servers

    def missing(self) -> list[int]:
        """Experts that nobody holds."""
        return np.flatnonzero(self.expert_servers[: self.num_experts, 0] < 0).tolist()

    @property
    def idle_links(self) -> list[ServerLink]:
        """Draining servers that nothing goes to any more."""
        busy = set(self.expert_servers.ravel().tolist())
        return [link for i, link in enumerate(self.links) if link.draining and i not in busy]

    def without(self, excluded: Iterable[ServerLink]) -> RoutingTable:
        """The same table as if the excluded servers were not there."""
        gone = {id(link) for link in excluded}
        return RoutingTable(
            self.epoch, self.num_experts, [link for link in self.links if id(link) not in gone]
        )
