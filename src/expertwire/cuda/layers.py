"""What every object that serves a model's MoE layers to code on a GPU has in common."""

from __future__ import annotations

import abc
from typing import Any, Self

import torch

from ..errors import ConfigError
from .client import GpuClient, GpuHandle


class GpuLayers(abc.ABC):
    """MoE layers behind a `GpuClient`: what `expertwire.transformers.attach` takes.

    model_info: name, num_layers, hidden_size, num_experts, top_k, dtype.
    """

    client: GpuClient
    model_info: dict[str, Any]

    @classmethod
    def refuse_capture(cls) -> None:
        """Raises ConfigError while a CUDA graph is being captured."""
        if torch.cuda.is_current_stream_capturing():
            raise ConfigError(f"{cls.__name__} compiles, connects and warms up when it is made, "
                              "which a CUDA graph capture cannot hold: make it before the capture")

    def warm_up(self) -> None:
        """One batch there and back, so that nothing is loaded or compiled later."""
        client, device = self.client, self.client.target.device
        hidden = torch.zeros(1, client.shape.hidden_size, dtype=client.dtype, device=device)
        ids = torch.zeros(1, self.model_info["top_k"], dtype=torch.int64, device=device)
        self.moe(0, hidden, ids, torch.zeros_like(ids, dtype=torch.float32))
        self.check()

    def moe(
        self, layer: int, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """One MoE layer on the current stream, see `GpuClient.moe`."""
        return self.client.moe(layer, hidden, topk_ids, topk_weights)

    def dispatch(
        self, layer: int, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> GpuHandle:
        """Sends a batch; `combine` of what it returns is the result. See `GpuClient.dispatch`."""
        return self.client.dispatch(layer, hidden, topk_ids, topk_weights)

    def check(self) -> None:
        """Waits for the current stream and raises what went wrong, see `GpuClient.check`."""
        self.client.check()

    @abc.abstractmethod
    def close(self) -> None:
        """Gives everything back. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
