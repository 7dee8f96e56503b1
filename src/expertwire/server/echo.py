"""A shard that sends rows back as they are: what a trip costs without any experts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from ..errors import ConfigError


class EchoShard:
    """Holds experts 0..num_experts-1 in name only; the server answers with the rows it got."""

    echo = True
    min_rows = 1

    def __init__(self, num_experts: int = 1):
        self.experts: Sequence[int] = range(num_experts)

    def run(
        self, layer: int, rows: torch.Tensor, offsets: Sequence[int], batch_invariant: bool
    ) -> torch.Tensor:
        raise ConfigError("an echo shard has no experts to run")


def echo_model(
    hidden_size: int, dtype: str, *, num_layers: int = 1, num_experts: int = 1, top_k: int = 1
) -> dict:
    """Model facts for an echo server."""
    facts = {
        "name": "echo", "num_layers": num_layers, "num_experts": num_experts,
        "hidden_size": hidden_size, "top_k": top_k, "dtype": dtype,
    }
    fingerprint = hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()[:32]
    return {**facts, "fingerprint": fingerprint}
