"""A step in place with replicas, where some servers do not answer, and the kernels that go on."""

from __future__ import annotations

import time

import numpy as np
import torch

from expertwire.device_structs import ClientFailoverArgs, KernelStatus, ServerTakeArgs
from expertwire.loopback import Loopback, StepShape
from expertwire.message import ReplyMode
from tests.steps import inputs

SHARES = [[0, 1, 2, 3, 4, 5], [0, 1, 2], [3, 4, 5], [1, 4]]
SHAPE = StepShape(19, 72, 3, 6, SHARES, torch.float32, reply_mode=ReplyMode.PER_EXPERT)


class FailoverRig:
    """lost: words that the host writes, in memory that kernels reach."""

    def __init__(self, target, lost, shares=SHARES, *, timeout_ns: int = 20_000_000, seed: int = 1,
                 warps: int = 2):
        shape = StepShape(19, 72, 3, 6, shares, torch.float32, reply_mode=ReplyMode.PER_EXPERT)
        self.batch = inputs(shape, seed)
        self.step = step = Loopback(target, shape, *self.batch, in_place=True,
                                    timeout_ns=timeout_ns)
        self.target, self.warps = target, warps
        self.lost_block = lost
        self.lost = lost.tensor.numpy()[: 4 * len(shares)].view(np.uint32)
        self.resend, self.counted_before = target.alloc(4, 0xFF), target.alloc(8)
        self.failover = ClientFailoverArgs(
            wait=step.combine, expert_servers=step.expert_servers.addr, lost=lost.addr,
            resend=self.resend.addr, num_experts=6, max_replicas=step.route.max_replicas,
        )

    def run(self, *steps, grid: int = 1) -> None:
        self.target.prepare(steps, grid=grid, warps=self.warps).run()
        self.target.synchronize()

    def send(self, again: bool = False) -> None:
        args = self.step.send_args
        args.only_if = self.resend.addr if again else 0
        args.route.num_skipped = (self.counted_before if again else self.step.num_skipped).addr
        self.run(("client_send_direct", self.step.send_args), grid=3)

    def serve(self, *servers: int) -> None:
        for s in servers:
            server = self.step.servers[s]
            self.run(("server_take", ServerTakeArgs(poll=server.poll, gather=server.gather)),
                     ("server_gather_rows", server.gather))
            server.run_experts(lambda rows: rows * 2)
            self.run(("server_reply_in_place", server.reply_args), grid=2)

    def fail_over(self) -> float:
        """Runs the kernel; seconds that it took."""
        start = time.monotonic()
        self.run(("client_failover", self.failover))
        return time.monotonic() - start

    def combine(self) -> torch.Tensor:
        self.run(("client_combine", self.step.combine), grid=3)
        return self.step.result()

    def status(self) -> KernelStatus:
        return self.step.status.read_struct(KernelStatus)

    def loaded(self) -> list[int]:
        return np.flatnonzero(np.frombuffer(self.step.batch_size.read(), np.uint32)).tolist()

    def will_resend(self) -> int:
        return int(any(self.resend.read()))

    def want(self) -> torch.Tensor:
        from expertwire.model.reference import moe_reference

        return moe_reference(*self.batch, lambda _, rows: rows * 2, 6)
