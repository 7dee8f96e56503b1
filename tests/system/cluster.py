"""Small clusters in one process: a registry, servers of simple experts, clients."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import torch

from expertwire import Client, Registry, Server
from expertwire.model.reference import moe_reference

TOKEN = b"cluster-token-0123456789"


def wait_until(condition, seconds: float = 30.0) -> None:
    """What counts and reports say comes a moment after what they tell of."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


class ScaledExperts:
    """Expert e multiplies by (e + 1) and adds e: cheap, exact in fp32, and tells rows apart."""

    echo = False
    min_rows = 3  # as if products of fewer rows gave other bits: groups come padded

    def __init__(self, experts: Sequence[int], dtype: torch.dtype = torch.float32):
        self.experts = list(experts)
        self.dtype = dtype
        self.num_runs = 0
        self.fail_on_layer: int | None = None

    def run(self, layer, rows, offsets, batch_invariant):
        self.num_runs += 1
        if layer == self.fail_on_layer:
            raise RuntimeError("these experts fail on purpose")
        out = torch.empty_like(rows)
        for i, expert in enumerate(self.experts):
            begin, end = offsets[i], offsets[i + 1]
            out[begin:end] = apply_expert(expert, rows[begin:end], layer)
        return out

    def extended(self, other: ScaledExperts) -> ScaledExperts:
        return ScaledExperts(sorted({*self.experts, *other.experts}), self.dtype)

    def without(self, experts: Sequence[int]) -> ScaledExperts:
        return ScaledExperts([e for e in self.experts if e not in experts], self.dtype)

    def unstack(self) -> None:
        """There are no weights."""


def apply_expert(expert: int, rows: torch.Tensor, layer: int = 0) -> torch.Tensor:
    return rows * (expert + 1) + (expert + 100 * layer)


def model_facts(
    num_experts=8, hidden_size=16, num_layers=2, top_k=2, dtype="float32", name="scaled"
) -> dict:
    return {
        "fingerprint": f"{name}-{num_experts}-{hidden_size}", "name": name,
        "num_layers": num_layers, "num_experts": num_experts, "hidden_size": hidden_size,
        "top_k": top_k, "dtype": dtype,
    }


@contextlib.contextmanager
def cluster(
    shares: Sequence[Sequence[int]], model: dict | None = None, *, server_options=None,
    **client_options,
) -> Iterator[tuple[Client, list[Server], Registry]]:
    """A registry, one server per share of experts, and a connected client."""
    model = model or model_facts()
    dtype = getattr(torch, model["dtype"])
    with contextlib.ExitStack() as stack:
        registry = stack.enter_context(Registry(token=TOKEN))
        servers = []
        for i, share in enumerate(shares):
            servers.append(stack.enter_context(Server(
                ScaledExperts(share, dtype), model, registry, token=TOKEN, name=f"s{i}",
                **(server_options or {}),
            )))
            servers[-1].wait_registered(30)  # in turn, so that s0 has seat 0
        client = stack.enter_context(Client(registry, token=TOKEN, **client_options))
        client.links.wait(lambda table: len(table.links) == len(servers), 30)
        yield client, servers, registry


def batch(num_tokens, model, top_k=None, seed=0, dtype=torch.float32):
    """Hidden rows that encode their token, random ids and weights."""
    generator = torch.Generator().manual_seed(seed)
    top_k = top_k or model["top_k"]
    hidden = torch.randn(num_tokens, model["hidden_size"], generator=generator)
    hidden[:, 0] = torch.arange(num_tokens)
    ids = torch.randint(0, model["num_experts"], (num_tokens, top_k), generator=generator)
    weights = torch.rand(num_tokens, top_k, generator=generator)
    return hidden.to(dtype), ids, weights


def expected(hidden, ids, weights, model, layer=0):
    return moe_reference(
        hidden, ids, weights, lambda e, rows: apply_expert(e, rows, layer), model["num_experts"]
    )
