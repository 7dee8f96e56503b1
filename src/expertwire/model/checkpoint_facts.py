"""What a config must say, and whether it speaks of the checkpoint that lies beside it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError

if TYPE_CHECKING:
    from .checkpoint import TensorPlace
    from .weight_map import Key

TOP_K_NAMES = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k",
    "top_k_experts",
)
# Extra layers that predict tokens further ahead: how many there are, and what only they have.
AHEAD_NAMES = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")
AHEAD_TENSOR = re.compile(r"\.(eh_proj|enorm|hnorm|shared_head|mtp\w*|nextn\w*)\b")
LAYER = re.compile(r"(?P<prefix>.*?)layers\.(?P<layer>\d+)\.")


def top_k_of(model: Any, config: Any) -> int:
    """Experts per token; the largest, for a model whose layers differ."""
    for name in TOP_K_NAMES:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)) and value:
            value = max(value)
        if isinstance(value, int):
            return value
    modules = model.modules() if model is not None else ()
    found = [m.top_k for m in modules if isinstance(getattr(m, "top_k", None), int)]
    if not found:
        raise CheckpointError(
            f"model type {config.model_type!r}: no experts per token in its config (looked for "
            f"{', '.join(TOP_K_NAMES)})"
        )
    return max(found)


def refuse_larger_checkpoint(
    path: str | Path, config: Any, num_experts: int, places: Sequence[Mapping[Key, TensorPlace]],
    names: Collection[str],
) -> None:
    """Raises CheckpointError if the files have experts or decoder layers that the config hides.

    places: of each MoE layer, its expert tensors. names: all tensors. Layers after the last one
    are fine if they predict tokens further ahead (multi-token prediction), which this package, as
    transformers, leaves aside.
    """
    for layer in places:
        for key, place in layer.items():
            there = place.shape[0] if place.fused else key.expert + 1
            if there > num_experts or (place.fused and there < num_experts):
                raise CheckpointError(
                    f"{path}: its config says {num_experts} experts, but {place.name} in "
                    f"{place.file.name} is of {'one of ' if not place.fused else ''}{there} or "
                    "more; is the config another checkpoint's?"
                )
    num_layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(num_layers, int):
        return
    matches = [m for name in names if (m := LAYER.match(name))]
    expert_names = {place.name for layer in places for place in layer.values()}
    prefixes = {m["prefix"] for m in matches if m.string in expert_names}
    beyond = [m for m in matches if m["prefix"] in prefixes and int(m["layer"]) >= num_layers]
    said = [n for name in AHEAD_NAMES if isinstance(n := getattr(config, name, None), int)]
    ahead = {int(m["layer"]) for m in beyond if AHEAD_TENSOR.search(m.string)}
    ahead |= set(range(num_layers, num_layers + max(said, default=0)))
    hidden = sorted({int(m["layer"]) for m in beyond} - ahead)
    if hidden:
        name = next(m.string for m in beyond if int(m["layer"]) == hidden[0])
        raise CheckpointError(
            f"{path}: its config says {num_layers} layers, but there is {name}; is the config "
            "another checkpoint's?"
        )
