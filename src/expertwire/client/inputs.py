"""What a caller hands to `Client.moe`, checked against the model and ready for packing."""

from __future__ import annotations

from operator import attrgetter

import torch

from ..errors import ConfigError
from ..message import FP8_BLOCK, dtype_of
from ..model.reference import quantise_fp8

CPU = torch.device("cpu")
ID_TYPES = (torch.int64, torch.int32)


class Batch:
    """Inputs of one dispatch, kept alive (and unchanged) until it is combined."""

    def __init__(
        self, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, fp8: bool
    ):
        self.num_tokens, self.top_k = topk_ids.shape
        self.output = torch.empty(hidden.shape, dtype=hidden.dtype)
        if topk_weights.dtype is not torch.float32:
            topk_weights = topk_weights.to(torch.float32)
        self.ids, self.weights = _dense_rows(topk_ids), _dense_rows(topk_weights)
        self.scales: torch.Tensor | None = None
        if fp8:
            hidden, self.scales = quantise_fp8(hidden.detach(), FP8_BLOCK)
        self.rows = _dense_rows(hidden)


def _dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it if the elements of a row are not side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class InputCheck:
    """Checks batches against one model's facts; cheap for those that fit.

    model: as the servers give it. max_top_k: experts per row that the slots were made for.
    device: where the tensors lie.
    """

    def __init__(
        self, model: dict, max_top_k: int, device: torch.device = CPU
    ):
        self.model, self.device = model, device
        self._is_here = attrgetter("is_cpu") if device.type == "cpu" else self._is_on_device
        self.dtype = dtype_of(model["dtype"])
        self.hidden_size, self.num_layers = model["hidden_size"], model["num_layers"]
        self.max_top_k = max_top_k

    def __call__(
        self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> None:
        """Raises ConfigError that says what was expected, also for what is no tensor."""
        try:
            shape, ids_shape = hidden.shape, ids.shape
            fits = (
                len(shape) == 2 and shape[1] == self.hidden_size
                and hidden.dtype is self.dtype and self._is_here(hidden)
                and len(ids_shape) == 2 and ids_shape[0] == shape[0] and ids_shape == weights.shape
                and ids.dtype in ID_TYPES and weights.is_floating_point()
                and self._is_here(ids) and self._is_here(weights)
                and hidden.layout is ids.layout is weights.layout is torch.strided
                and 1 <= ids_shape[1] <= self.max_top_k
                and isinstance(layer, int) and 0 <= layer < self.num_layers
            )
        except (AttributeError, TypeError):  # lists, numpy arrays
            fits = False
        if not fits:
            raise ConfigError(self._problem(layer, hidden, ids, weights))

    def _is_on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device

    def _problem(
        self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> str:
        name = self.model["name"]
        if not isinstance(layer, int):
            return f"layer must be a whole number, not {type(layer).__name__}"
        for what, tensor, shape in (
            ("hidden", hidden, f"[T, {self.hidden_size}] {self.model['dtype']}"),
            ("topk_ids", ids, "[T, K] int64 or int32"),
            ("topk_weights", weights, "[T, K] floating point"),
        ):
            if not isinstance(tensor, torch.Tensor):
                return f"{what} must be a torch tensor {shape}, not {type(tensor).__name__}"
            if tensor.layout is not torch.strided:
                return f"{what} must be a dense tensor, not {tensor.layout}"
        if hidden.dim() != 2 or hidden.shape[1] != self.hidden_size:
            return f"hidden must be [T, {self.hidden_size}] for {name}, not {list(hidden.shape)}"
        if hidden.dtype != self.dtype:
            return (
                f"hidden is {hidden.dtype}, the servers compute in {self.model['dtype']}: convert "
                f"it, or start the servers with --dtype {str(hidden.dtype).removeprefix('torch.')}"
            )
        for what, tensor in (("hidden", hidden), ("topk_ids", ids), ("topk_weights", weights)):
            if not self._is_here(tensor):
                where = "CPU memory" if self.device.type == "cpu" else str(self.device)
                return f"{what} is on {tensor.device}; this client sends from {where}"
        if ids.dim() != 2 or ids.shape[0] != hidden.shape[0] or ids.shape != weights.shape:
            return (
                f"topk_ids and topk_weights must both be [{hidden.shape[0]}, K], not "
                f"{list(ids.shape)} and {list(weights.shape)}"
            )
        if ids.dtype not in ID_TYPES:
            return f"topk_ids must be int64 or int32, not {ids.dtype}"
        if not weights.dtype.is_floating_point:
            return f"topk_weights must be floating point, not {weights.dtype}"
        if not 1 <= ids.shape[1] <= self.max_top_k:
            return f"{ids.shape[1]} experts per token; the model has top-{self.model['top_k']}"
        return (f"layer {layer} does not exist: {name} has {self.num_layers} MoE layers, "
                "numbered from 0")
