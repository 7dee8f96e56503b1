"""The experts of most families, without importing their modelling code.

silu(gate) * up with [gate; up] and down weights, no bias. A server needs nothing else of such a
family, and transformers' modelling code takes seconds to import. The family tests compare every
one of these with transformers' own module.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from ..model.weight_map import Key

# Families that use transformers' default gate, with hidden_act "silu".
PLAIN_FAMILIES = frozenset({
    "deepseek_v2", "deepseek_v3", "glm4_moe", "granitemoe", "minimax_m2", "mixtral", "olmoe",
    "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_next",
})
# The decoder's own layers only: published checkpoints may hold more, as mtp.layers.0 or as a layer
# after the last, for predicting several tokens, which no model here loads.
NAME = re.compile(
    r"(?:model\.)?layers\.(?P<layer>\d+)\.(?:mlp|block_sparse_moe)\.(?:"
    r"experts\.(?P<expert>\d+)\.(?P<part>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight|"
    r"experts\.(?P<fused>gate_up_proj|down_proj)|(?P<linear>input_linear|output_linear)\.weight)"
)
PART_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
LINEAR_NAMES = {"input_linear": "gate_up_proj", "output_linear": "down_proj"}
HALVES = ["gate_proj", "up_proj"]  # of gate_up_proj, as transformers concatenates them


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


class PlainMap:
    """weight_map.TensorMap of a plain family. layers: its decoder layers that have experts."""

    def __init__(self, layers: Iterable[int]):
        self._layers = {layer: i for i, layer in enumerate(layers)}

    def find(self, names: Iterable[str]) -> dict[str, tuple[int, Key]]:
        found = {}
        for name in names:
            match = NAME.fullmatch(name)
            if match is None or int(match["layer"]) not in self._layers:
                continue
            if match["part"]:
                part = PART_NAMES.get(match["part"], match["part"])
                parameter = "gate_up_proj" if part in HALVES else part
                key = Key(parameter, part, int(match["expert"]))
            else:
                key = Key(match["fused"] or LINEAR_NAMES[match["linear"]], "", -1)
            found[name] = (self._layers[int(match["layer"])], key)
        return found

    def parts(self, part: str) -> list[str]:
        return HALVES if part in HALVES else [part]

    def part_name(self, part: str, parameter: str) -> str:
        return part or parameter

    def is_stacked(self, part: str) -> bool:
        return True

    def convert(self, tensors: dict[str, torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        raise ValueError("plain families need no conversion")


def plain_layers(
    config: Any, names: Collection[str]
) -> tuple[list[tuple[str, torch.nn.Module]], PlainMap] | None:
    """(name, experts module) of each MoE layer in order, and the map of a checkpoint's tensors.

    None if the family needs its own modelling code, or if a decoder layer has neither experts nor
    a dense network of a known name: then only the real code can tell what is missing.
    """
    if config.model_type not in PLAIN_FAMILIES or getattr(config, "hidden_act", "") != "silu":
        return None
    counts = [getattr(config, n, None) for n in
              ("num_experts", "num_local_experts", "n_routed_experts")]
    num_experts = next((n for n in counts if isinstance(n, int)), None)
    if num_experts is None:
        return None
    matches = [match for name in names if (match := NAME.fullmatch(name))]
    prefixes = {match.string.partition("layers.")[0] for match in matches}
    with_experts = {int(match["layer"]) for match in matches}
    layers = []
    for layer in range(config.num_hidden_layers):
        if layer in with_experts:
            layers.append(layer)
        elif not any(f"{p}layers.{layer}.mlp.down_proj.weight" in names for p in prefixes):
            return None
    if not layers or len(prefixes) != 1:
        return None
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    modules: list[tuple[str, torch.nn.Module]] = [
        (f"layers.{layer}", PlainExperts(num_experts, config.hidden_size, width))
        for layer in layers
    ]
    return modules, PlainMap(layers)
