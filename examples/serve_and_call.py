"""A registry, two expert servers and a client in one process, compared with plain torch."""

import torch

from expertwire import Client, Registry, Server
from expertwire.demo import demo_model_path
from expertwire.model.checkpoint import inspect_model, load_experts
from expertwire.model.reference import moe_reference

path = demo_model_path()
info = inspect_model(path)
halves = range(info.num_experts // 2), range(info.num_experts // 2, info.num_experts)

with (
    Registry("127.0.0.1:0") as registry,
    Server.from_checkpoint(path, halves[0], registry, dtype="float32"),
    Server.from_checkpoint(path, halves[1], registry, dtype="float32"),
    Client(registry) as client,
):
    client.wait_ready()
    hidden = torch.randn(5, info.hidden_size)
    topk_ids = torch.tensor([[0, 15], [3, 4], [8, 9], [15, 0], [7, -1]])  # -1: no expert
    topk_weights = torch.rand(5, 2)
    output = client.moe(0, hidden, topk_ids, topk_weights)

shard = load_experts(path, None, dtype="float32")
expected = moe_reference(
    hidden, topk_ids, topk_weights, shard.layers[0].forward, info.num_experts
)
print(f"largest difference from plain torch: {(output - expected).abs().max().item():.1e}")
