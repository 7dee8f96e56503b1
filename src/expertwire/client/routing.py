"""Which server serves which expert, as one immutable table that a batch is routed by."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..message import ReplyMode

if TYPE_CHECKING:
    from .link import ServerLink


def expert_table(
    shares: Sequence[Sequence[int]], num_experts: int, leaving: Sequence[bool] = ()
) -> np.ndarray:
    """Experts of each server -> int32 [num_experts, max_replicas]: servers, -1 ends a row.

    leaving: whether a server is about to leave; it is used only where nobody else holds an expert.
    """
    staying: list[list[int]] = [[] for _ in range(num_experts)]
    going: list[list[int]] = [[] for _ in range(num_experts)]
    for idx, experts in enumerate(shares):
        holders = going if leaving and leaving[idx] else staying
        for expert in experts:
            if 0 <= expert < num_experts:
                holders[expert].append(idx)
    holders = [stay or leave for stay, leave in zip(staying, going, strict=True)]
    max_replicas = max(1, max((len(h) for h in holders), default=1))
    table = np.full((max(num_experts, 1), max_replicas), -1, np.int32)
    for expert, servers in enumerate(holders):
        table[expert, : len(servers)] = servers
    return table


def replica_rotation(reply_mode: int, seq: int, layer: int) -> int:
    """replica_rotation of device/client_route.cuh: which replica a message begins with."""
    if reply_mode == ReplyMode.PER_EXPERT:
        return (seq * 0x9E3779B97F4A7C15 & (1 << 64) - 1) >> 33
    return layer


class RoutingTable:
    """expert -> servers, for the servers that a client is connected to.

    links: the servers, ordered by id, so that every client numbers them the same way.
    expert_servers: int32 [num_experts, max_replicas], index into links, -1 ends a row.
    """

    def __init__(self, epoch: int, num_experts: int, links: Iterable[ServerLink]):
        self.epoch = epoch
        self.num_experts = num_experts
        self.links: Sequence[ServerLink] = sorted(links, key=lambda link: link.server_id)
        leaving = [link.draining for link in self.links]
        self.expert_servers = expert_table(
            [link.experts for link in self.links], num_experts, leaving
        )
        self.max_replicas = self.expert_servers.shape[1]

    @functools.cached_property
    def alone(self) -> frozenset[int]:
        """Servers (index into links) that hold an expert which no other one here does."""
        once = (self.expert_servers >= 0).sum(axis=1) == 1
        return frozenset(self.expert_servers[once, 0].tolist())

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
