"""Client and server in one process on one GPU."""

from __future__ import annotations

from typing import Any

import torch

from ..message import ReplyMode, SlotShape
from ..trace import recorder as trace
from .client import GpuClient, Peer
from .experts import GpuExperts
from .layers import GpuLayers
from .server import GpuServer

CLIENT_ID = 1
WAIT_US = 200.0  # of one pass on the server's own stream: how long synchronising may take longer


class LocalExperts(GpuLayers):
    """The experts of a model behind a server on the same GPU.

    experts: all experts of the model. top_k: the most experts per token. max_rows: rows per
    message; a larger batch goes as several. num_slots: batches in flight. batch_invariant: replies
    hold a row per expert, summed in the token's own order by the client; else a row per token.
    own_stream: the server works on a stream of its own, relaunched by a thread, so that its work
    overlaps with the caller's; else its kernels follow each batch on the caller's stream. With
    it, set CUDA_DEVICE_MAX_CONNECTIONS=32 before CUDA starts: a stream that waits must not hold up
    another. timeout: seconds that a batch may take. fp8: rows travel as e4m3 with a scale per 128
    elements; lossy.

    `moe` may be captured in CUDA graphs. Make this object before the capture.
    """

    def __init__(
        self, experts: GpuExperts, top_k: int, *, max_rows: int = 512, num_slots: int = 2,
        batch_invariant: bool = True, own_stream: bool = False, timeout: float = 2.0,
        fp8: bool = False,
    ):
        self.refuse_capture()
        trace.join("experts on a GPU")
        num_experts = len(experts.experts)
        self.experts, self.own_stream = experts, own_stream
        self.model_info = {
            "name": experts.name, "num_layers": experts.num_layers, "top_k": top_k,
            "hidden_size": experts.hidden_size, "num_experts": num_experts,
            "dtype": str(experts.dtype).removeprefix("torch."),
        }
        shape = SlotShape(
            num_slots=num_slots, max_rows=max_rows, experts_per_row=top_k,
            hidden_size=experts.hidden_size, element_bytes=experts.dtype.itemsize, fp8=fp8,
            reply_mode=ReplyMode.PER_EXPERT if batch_invariant else ReplyMode.SUM,
            reply_element_bytes=experts.dtype.itemsize,
        )
        with torch.cuda.device(experts.device):
            self.server = GpuServer(
                experts, num_experts, shape, wait_us=WAIT_US if own_stream else 0.0
            )
            slots = [self.server.request_addr(i) for i in range(num_slots)]
            self.client = GpuClient(
                self.model_info, [Peer(0, experts.experts, slots)], shape, experts.device,
                client_id=CLIENT_ID, timeout=timeout,
                after_send=None if own_stream else self.server.enqueue, waits_apart=own_stream,
            )
            self.server.connect(CLIENT_ID, self.client.reply_addrs(0))
            if own_stream:
                self.server.start()
            self.warm_up()

    @classmethod
    def from_model(cls, model: Any, **options: Any) -> LocalExperts:
        """All experts of a transformers model that is on a GPU; the weights are shared.

        Then `expertwire.transformers.attach(model, experts)` makes the model use them. options: of
        this class. Raises CheckpointError, ConfigError.
        """
        top_k = model.config.get_text_config().num_experts_per_tok
        return cls(GpuExperts.from_model(model), top_k, **options)

    def check(self) -> None:
        """Waits for the current stream and raises what went wrong, see `GpuClient.check`."""
        self.server.check()
        self.client.check()

    def close(self) -> None:
        """Ends the server's passes. Idempotent."""
        self.server.close()
