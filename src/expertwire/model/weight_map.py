"""Which tensor of a checkpoint holds which expert: transformers' own conversion mapping, asked.

A family publishes its experts in one of several layouts: a tensor per expert and projection, one
tensor for all experts of a layer, other names, transposed. transformers knows them all, as a list
of renamings and converters per model type; the same list is used here, so a layout that
transformers can load can be served, one expert at a time. Nothing here reads a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..errors import CheckpointError

EXPERT_ID = re.compile(r"\.(\d+)\.(?!.*\.\d+\.)")  # the last number of a name
PART = re.compile(r"(\w+?)(?:\\?\.weight)?\$?$")


@dataclass(frozen=True)
class Key:
    """What a tensor is, within its layer.

    parameter: of the experts module, as gate_up_proj. part: the converter's source pattern, or ""
    where the tensor is the parameter itself. expert: id, or -1 for a tensor with all experts,
    along its first dimension.
    """

    parameter: str
    part: str
    expert: int


class TensorMap(Protocol):
    """What a checkpoint's tensors are for: WeightMap, or plain_experts.PlainMap."""

    def find(self, names: Iterable[str]) -> dict[str, tuple[int, Key]]:
        """{tensor name: (MoE layer, what it is there)}, for the names that are experts'."""
        ...

    def parts(self, part: str) -> list[str]:
        """The parts that make one parameter together with this one, in order."""
        ...

    def part_name(self, part: str, parameter: str) -> str:
        """For messages, as up_proj."""
        ...

    def is_stacked(self, part: str) -> bool:
        """True if the parts of an expert are simply put one below the other, or are one."""
        ...

    def convert(self, tensors: dict[str, torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        """One expert's part of a parameter, where the parts are not simply stacked."""
        ...


class WeightMap:
    """The mapping of one model.

    model: on the meta device. modules: (name, experts module) of each MoE layer, in order.
    """

    def __init__(self, model: Any, modules: Sequence[tuple[str, torch.nn.Module]]):
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        mapping = get_model_conversion_mapping(model)
        self._prefix = model.base_model_prefix
        self._config = model.config
        self._state = model.state_dict()
        self._renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
        converters = [m for m in mapping if isinstance(m, WeightConverter)]
        self._converters = converters
        self._by_part = {part: c for c in converters for part in c.source_patterns}
        self._targets = {
            f"{name}.{parameter}": (layer, parameter)
            for layer, (name, module) in enumerate(modules)
            for parameter, _ in module.named_parameters()
        }

    def find(self, names: Iterable[str]) -> dict[str, tuple[int, Key]]:
        """{tensor name: (MoE layer, what it is there)}, for the names that are experts'."""
        from transformers.core_model_loading import dot_natural_key

        # In the order in which transformers goes through them: some renamings count.
        found = {}
        for name in sorted(names, key=dot_natural_key):
            target, part = self._rename(name)
            if target not in self._targets:
                continue
            layer, parameter = self._targets[target]
            expert = -1
            if part and self._is_per_expert(part):
                match = EXPERT_ID.search(name)
                if match is None:
                    raise CheckpointError(f"tensor {name}: no expert id in its name")
                expert = int(match[1])
            found[name] = (layer, Key(parameter, part, expert))
        return found

    def _rename(self, name: str) -> tuple[str, str]:
        from transformers.core_model_loading import rename_source_key

        target, part = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._state
        )
        if target not in self._state and name in self._state:
            target, part = rename_source_key(name, [], [], self._prefix, self._state)
        return target, part or ""

    def _is_per_expert(self, part: str) -> bool:
        return _kind(self._by_part[part].operations[0]) == "MergeModulelist"

    def parts(self, part: str) -> list[str]:
        """The source patterns that make one parameter together with this one, in order."""
        return list(self._by_part[part].source_patterns) if part else [""]

    def part_name(self, part: str, parameter: str) -> str:
        """For messages: up_proj of a pattern like mlp.experts.*.up_proj.weight."""
        match = PART.search(part)
        return match[1] if match else parameter

    def is_stacked(self, part: str) -> bool:
        """True if the sources of an expert are simply put one below the other, or are one."""
        if not part:
            return True
        kinds = [_kind(op) for op in self._by_part[part].operations]
        if kinds == ["MergeModulelist"]:
            return True
        last = self._by_part[part].operations[-1]
        return kinds == ["MergeModulelist", "Concatenate"] and getattr(last, "dim", None) == 1

    def convert(self, tensors: dict[str, torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        """One expert's part of a parameter, from its tensors by source pattern.

        Runs the converter's operations as for a model with a single expert. shape: what is
        wanted. Raises ValueError, RuntimeError as transformers' operations do for tensors that do
        not fit.
        """
        converter = self._by_part[next(iter(tensors))]
        per_expert = _kind(converter.operations[0]) == "MergeModulelist"
        collected: dict[str, Any] = {
            part: [tensors[part] if per_expert else tensors[part].unsqueeze(0)]
            for part in converter.source_patterns
        }
        target = converter.target_patterns[0]
        for operation in converter.operations:
            collected = operation.convert(
                collected, source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns, full_layer_name=target,
                model=OneExpert(shape, self._config), config=self._config, missing_keys=None,
            )
        if len(collected) != 1:
            raise ValueError(f"{len(collected)} results for {target}")
        (result,) = collected.values()
        if isinstance(result, list):
            (result,) = result
        return result.squeeze(0)


class OneExpert:
    """Stands in for the model where an operation asks for a parameter's shape."""

    def __init__(self, shape: Sequence[int], config: Any):
        self.config = config
        self._parameter = torch.empty((1, *shape), device="meta")

    def get_parameter(self, _: str) -> torch.Tensor:
        return self._parameter


def parameter_sizes(module: torch.nn.Module) -> tuple[int, int]:
    """(number of experts, hidden size) of an experts module, from its parameters' shapes.

    The hidden size is what the experts take and give: smaller than the model's in families that
    project into a latent space first.
    """
    num_experts, *sides = module.get_parameter("down_proj").shape  # [hidden, inner], or turned
    return num_experts, sides[1 if getattr(module, "is_transposed", False) else 0]


def _kind(operation: Any) -> str:
    return type(operation).__name__
