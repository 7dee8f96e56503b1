"""The experts of most families, without importing their modelling code.

silu(gate) * up with fused [gate; up] and down weights, no bias. A server needs nothing else of
such a family, and transformers' modelling code takes seconds to import. The family tests compare
every one of these with transformers' own module.
"""

from __future__ import annotations

from typing import Any

import torch

# Families that use transformers' default gate, with hidden_act "silu".
PLAIN_FAMILIES = frozenset({
    "deepseek_v2", "deepseek_v3", "glm4_moe", "granitemoe", "minimax_m2", "mixtral", "olmoe",
    "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_next",
})


class PlainExperts(torch.nn.Module):
    """Stands for one layer's experts module: its parameters' shapes (on meta) and its gate."""

    has_gate, has_bias, is_transposed = True, False, False

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int):
        super().__init__()
        first = torch.empty(num_experts, 2 * intermediate_size, hidden_size, device="meta")
        down = torch.empty(num_experts, hidden_size, intermediate_size, device="meta")
        self.gate_up_proj = torch.nn.Parameter(first, requires_grad=False)
        self.down_proj = torch.nn.Parameter(down, requires_grad=False)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


def plain_modules(
    config: Any, num_layers: int, num_experts: int
) -> list[tuple[str, torch.nn.Module]] | None:
    """Like checkpoint.expert_modules; None if the family needs its own modelling code."""
    if config.model_type not in PLAIN_FAMILIES or getattr(config, "hidden_act", "") != "silu":
        return None
    dense = getattr(config, "first_k_dense_replace", 0) or 0
    dense += len(getattr(config, "mlp_only_layers", None) or ())
    if num_layers != config.num_hidden_layers - dense:
        return None  # an unusual pattern of layers, or tensors are missing: ask the real code
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return [
        (f"MoE layer {i}", PlainExperts(num_experts, config.hidden_size, width))
        for i in range(num_layers)
    ]
