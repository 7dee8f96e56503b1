"""Where the attention side runs, and the client that goes with it: on the CPU, or on a GPU."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .config import ClientConfig

if TYPE_CHECKING:
    from .cuda.remote import RemoteExperts


class AttentionClient(Protocol):
    """What commands need of a client, `Client` or `cuda.remote.RemoteExperts`."""

    @property
    def model_info(self) -> dict[str, Any] | None: ...
    def moe(
        self, layer: int, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor: ...
    def is_ready(self) -> bool: ...
    def recover(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


@contextmanager
def open_client(
    registry: str, *, device: torch.device | None, token: bytes, config: ClientConfig,
    name: str | None = None,
) -> Generator[AttentionClient]:
    """A client that has found servers for every expert.

    device: the GPU of the attention side, None for the CPU. Raises ConfigError for settings that a
    client on a GPU does not have, NoServerError, WaitTimeout, AuthError.
    """
    if device is None:
        from .client.client import Client

        with Client(registry, token=token, name=name, config=config) as client:
            client.wait_ready()
            yield client
    else:
        torch.cuda.set_device(device)
        with open_gpu_client(registry, device, token, config) as experts:
            yield experts


def open_gpu_client(
    registry: str, device: torch.device, token: bytes, config: ClientConfig
) -> RemoteExperts:
    """The same on a GPU. Raises also HcaError where memory cannot be shared."""
    from .cuda.remote import RemoteExperts

    return RemoteExperts(
        registry, device=device, token=token, max_rows=config.max_rows,
        num_slots=config.num_slots, batch_invariant=config.batch_invariant,
        timeout=config.reply_timeout or 5.0, connect_timeout=config.connect_timeout,
        fp8=config.fp8,
    )
