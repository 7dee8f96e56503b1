"""Experts on a GPU: every layer's held experts, run on rows whose counts only the GPU knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..errors import ConfigError
from ..message import DATA_TYPES
from ..server.experts import DEFAULT_GATES
from .compile import require


@dataclass(frozen=True)
class Tiles:
    """Geometry of a grouped product: rows, outputs and inputs of a tile; warps, pipeline stages.

    few_rows: an expert with at most so many rows takes one tile of so many instead; 0: none does.
    row_programs: programs that share the rows of one expert; more help when few experts have most.
    """

    rows: int = 16
    outputs: int = 64
    inputs: int = 128
    warps: int = 4
    stages: int = 4
    few_rows: int = 0
    row_programs: int = 1


# One tile for all counts: a row's bits then depend on nothing but the row and its expert. It costs
# up to a seventh of a decode step's experts against FEW, and halves the time at 512 rows.
INVARIANT = Tiles(rows=64, inputs=64)
FEW = Tiles()
ANY = Tiles(rows=64, inputs=64, few_rows=16)
WIDE_FP32 = Tiles(outputs=32, inputs=64, stages=2)


class Weights:
    """One projection of all layers: where each layer's [experts, ...] tensor lies.

    tensors: one per layer, of one shape and stride. transposed: [experts, in, out], else
    [experts, out, in]. biases: [experts, out] per layer, or none.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None,
        transposed: bool,
    ):
        first = tensors[0]
        for tensor in tensors:
            if (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) != (
                    first.shape, first.stride(), first.dtype, first.device):
                raise ConfigError("experts of different layers have different shapes or devices")
            if tensor.data_ptr() % 16:
                raise ConfigError("expert weights must be aligned to 16 bytes")
        self.tensors, self.biases, self.transposed = list(tensors), biases, transposed
        self.device, self.dtype = first.device, first.dtype
        out_dim, in_dim = (2, 1) if transposed else (1, 2)
        self.num_outputs, self.num_inputs = first.shape[out_dim], first.shape[in_dim]
        self.strides = first.stride(0), first.stride(out_dim), first.stride(in_dim)
        self.table = self._addresses(self.tensors)
        self.bias_table = self._addresses(biases) if biases else self.table
        self.bias_stride = biases[0].stride(0) if biases else 0

    def _addresses(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=self.device)

    def product(
        self, rows: torch.Tensor, offsets: torch.Tensor, layer: torch.Tensor, tiles: Tiles, *,
        gated: bool = False, out: torch.Tensor,
    ) -> torch.Tensor:
        """rows [N, in], offsets int32 [experts + 1], layer int32 [1] on the GPU -> out [N, out].

        gated: silu(first half of the outputs) * second half, [N, out / 2]. Rows beyond the last
        offset stay as they are. Enqueued on the current stream.
        """
        grouped_product = require(f"{__package__}.grouped").grouped_product
        num_outputs = self.num_outputs // 2 if gated else self.num_outputs
        grid = (-(-num_outputs // tiles.outputs), offsets.numel() - 1, tiles.row_programs)
        grouped_product[grid](
            rows, self.table, self.bias_table, offsets, layer, out, self.num_inputs, num_outputs,
            *self.strides, self.bias_stride, GATED=gated, HAS_BIAS=self.biases is not None,
            PRECISION="ieee" if self.dtype is torch.float32 else "tf32",
            BLOCK_ROWS=tiles.rows, BLOCK_OUTPUTS=tiles.outputs, BLOCK_INPUTS=tiles.inputs,
            FEW_ROWS=tiles.few_rows, NUM_ROW_PROGRAMS=tiles.row_programs,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )
        return out

    def library_product(
        self, rows: torch.Tensor, offsets: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """The same through torch's grouped_mm, for a layer that the CPU knows; no bias."""
        weight = self.tensors[layer]
        weight = weight if self.transposed else weight.transpose(-2, -1)
        return torch._grouped_mm(rows, weight, offs=offsets[1:])


class GpuExperts:
    """The held experts of every layer on one GPU.

    modules: each layer's experts module, for its gate, activation and layout flags. parts: each
    layer's parameters on one GPU, [held experts, ...] in the family's layout; kept by reference.
    experts: the global ids of what is held, ascending. Raises ConfigError for layers that differ
    in shape.
    """

    def __init__(
        self, modules: Sequence[torch.nn.Module], parts: Sequence[dict[str, torch.Tensor]],
        experts: Sequence[int], *, name: str = "experts",
    ):
        if not modules:
            raise ConfigError("there are no MoE layers")
        module = modules[0]
        self.name, self.experts, self.num_layers = name, list(experts), len(modules)
        has_gate = getattr(module, "has_gate", True)
        transposed = bool(getattr(module, "is_transposed", False))
        first = "gate_up_proj" if has_gate else "up_proj"
        self.first = self._weights(parts, first, transposed)
        self.down = self._weights(parts, "down_proj", transposed)
        self.device, self.dtype = self.down.device, self.down.dtype
        self.hidden_size = self.down.num_outputs
        if self.dtype not in DATA_TYPES:
            raise ConfigError(f"experts cannot be served in {self.dtype}")
        gate = module._apply_gate if has_gate else module.act_fn
        self._gate = cast(Callable[[torch.Tensor], torch.Tensor], gate)
        act = type(getattr(module, "act_fn", torch.nn.SiLU())).__name__.lower()
        self.fused = (has_gate and getattr(gate, "__module__", "") in DEFAULT_GATES
                      and "silu" in act)
        self.tiles = self.choose_tiles(0, batch_invariant=True)

    def choose_tiles(self, max_rows: int, *, batch_invariant: bool) -> Tiles:
        """For passes in which an expert gets at most max_rows rows."""
        if self.dtype is torch.float32:
            return WIDE_FP32
        if batch_invariant:
            return INVARIANT
        return FEW if max_rows <= FEW.rows else ANY

    @staticmethod
    def _weights(parts: Sequence[dict[str, torch.Tensor]], name: str, transposed: bool) -> Weights:
        biases = [part[f"{name}_bias"] for part in parts if f"{name}_bias" in part]
        return Weights([part[name] for part in parts], biases or None, transposed)

    @classmethod
    def from_model(cls, model: Any) -> GpuExperts:
        """All experts of a loaded transformers model that is on a GPU; its weights are shared.

        Raises CheckpointError for a family that cannot be plugged, ConfigError for a model that is
        not on a GPU.
        """
        from ..model.checkpoint import pluggable

        modules = [module for _, module in pluggable(model)]
        parts = [
            {name: p.detach() for name, p in module.named_parameters(recurse=False)}
            for module in modules
        ]
        first = next(iter(parts[0].values()))
        if first.device.type != "cuda":
            raise ConfigError(f"the model's experts are on {first.device}, not on a GPU")
        name = model.config.model_type
        return cls(modules, parts, range(first.shape[0]), name=name)

    @property
    def middle_size(self) -> int:
        """Elements of a row between the two projections."""
        return self.down.num_inputs

    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for w in (self.first, self.down) for t in w.tensors)

    def workspace(self, num_rows: int) -> torch.Tensor:
        """What `run` needs between the projections for at most num_rows rows."""
        width = self.middle_size if self.fused else self.first.num_outputs
        return torch.empty((num_rows, width), dtype=self.dtype, device=self.device)

    def run(
        self, layer: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor,
        middle: torch.Tensor, output: torch.Tensor, tiles: Tiles | None = None,
    ) -> None:
        """Unweighted outputs of rows grouped by expert, enqueued on the current stream.

        layer: int32 [1]; rows [N, H]; offsets int32 [held + 1]; middle from `workspace`; output
        [N, H]. All on the GPU: the CPU need not know layer or counts. tiles: default ones with
        which a row's bits depend on the row and its expert alone.
        """
        tiles = tiles or self.tiles
        self.first.product(rows, offsets, layer, tiles, gated=self.fused, out=middle)
        if not self.fused:
            middle = self._gate(middle)
        self.down.product(middle, offsets, layer, tiles, out=output)

    def run_library(
        self, layer: int, rows: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """The same with torch's grouped_mm: bf16, no biases, and the CPU must know the layer."""
        return self.down.library_product(
            self._gate(self.first.library_product(rows, offsets, layer)), offsets, layer
        )
