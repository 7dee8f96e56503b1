"""A client on a GPU of experts that other processes of the host hold on theirs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import time
from typing import Any

import torch

from ..control import Channel, connect_unix, load_token
from ..device_structs import SIGNAL_WRITE
from ..errors import ConfigError, ExpertwireError, NoServerError, ProtocolError, WaitTimeout
from ..link import DATA_PROTOCOL, parse_hex
from ..membership import Members, Membership, ServerInfo
from ..message import ReplyMode, SlotShape, dtype_of
from .client import GpuClient, GpuHandle, Peer
from .ipc import Exported, Imported
from .service import device_name

LEAVE_SECONDS = 5.0


class _Link:
    """One server: its channel, our reply memory, its request memory as this GPU reaches it."""

    def __init__(
        self, server: ServerInfo, request: dict[str, Any], shape: SlotShape, token: bytes,
        device: torch.device, deadline: float,
    ):
        self.server = server
        self.requests: Imported | None = None
        self.replies: Exported | None = None
        self.channel: Channel = connect_unix(server.address, token, _left(deadline))
        try:
            self.replies = Exported(device, shape.num_slots * shape.reply_slot_bytes)
            self.channel.send({**request, "memory": self.replies.handle.hex()})
            reply, fds = self.channel.recv(_left(deadline))
            for fd in fds:
                os.close(fd)
            if reply.get("type") == "error":
                raise ConfigError(f"server {server.server_id} refused the connection: "
                                  f"{reply.get('reason', 'no reason given')}")
            if reply.get("type") != "connected":
                raise ProtocolError(f"server {server.server_id} answered {reply.get('type')!r}")
            self.is_here = reply.get("device") == device_name(device)
            self.requests = Imported(device, parse_hex(reply, "memory"),
                                     shape.num_slots * shape.request_slot_bytes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets go of the server's memory, and of ours once the server has. Idempotent."""
        if self.requests is not None:
            self.requests.close()
        with contextlib.suppress(ExpertwireError):
            self.channel.send({"type": "leave"}, timeout=1.0)
            deadline = time.monotonic() + LEAVE_SECONDS
            while True:  # until the server closes its end, which it does last
                self.channel.recv(_left(deadline))
        self.channel.close()
        if self.replies is not None:
            self.replies.close()


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


class RemoteExperts:
    """All experts of a model, held by servers of this host (`expertwire serve --device cuda`).

    registry: HOST:PORT. device: of this client, default torch's current one. token: default as for
    `Client`. Other arguments as for `LocalExperts`; connect_timeout: seconds to find servers for
    every expert and connect to them. The servers are those that are there now.

    Use it as `LocalExperts`: `moe`, `dispatch`, `check`, `expertwire.transformers.attach`. Raises
    NoServerError, WaitTimeout, AuthError, ConfigError, HcaError where memory cannot be shared.
    """

    def __init__(
        self, registry: str, *, device: torch.device | int | None = None,
        token: bytes | None = None, max_rows: int = 256, num_slots: int = 2,
        batch_invariant: bool = True, timeout: float = 5.0, connect_timeout: float = 10.0,
    ):
        if torch.cuda.is_current_stream_capturing():
            raise ConfigError("RemoteExperts connects when it is made: make it before the capture")
        index = torch.cuda.current_device() if device is None else device
        self.device = index if isinstance(index, torch.device) else torch.device("cuda", index)
        token = load_token() if token is None else token
        deadline = time.monotonic() + connect_timeout
        servers = find_servers(registry, token, connect_timeout)
        self.model_info = model = servers[0].model
        element = dtype_of(model["dtype"]).itemsize
        shape = SlotShape(
            num_slots=num_slots, max_rows=max_rows, experts_per_row=model["top_k"],
            hidden_size=model["hidden_size"], element_bytes=element, fp8=False,
            reply_mode=ReplyMode.PER_EXPERT if batch_invariant else ReplyMode.SUM,
            reply_element_bytes=element,
        )
        client_id = 1 + secrets.randbelow((1 << 32) - 1)
        request = {
            "type": "connect", "data_protocol": DATA_PROTOCOL, "memory_kind": "cuda_ipc",
            "client_id": client_id, "client": f"client-{os.getpid()}",
            "fingerprint": model["fingerprint"], "shape": dataclasses.asdict(shape),
            "num_qps": 1, "signal_mode": SIGNAL_WRITE, "do_ibgda": False,
        }
        self._links: list[_Link] = []
        try:
            with torch.cuda.device(self.device):
                for server in servers:
                    self._links.append(_Link(server, request, shape, token, self.device, deadline))
                self.client = GpuClient(
                    model, [_peer(link, shape) for link in self._links], shape, self.device,
                    client_id=client_id, timeout=timeout,
                    waits_apart=any(link.is_here for link in self._links),
                    reply_addrs=[link.replies.addr for link in self._links if link.replies],
                )
                # One batch there and back, so that nothing is loaded or compiled later.
                hidden = torch.zeros(1, shape.hidden_size, dtype=self.client.dtype,
                                     device=self.device)
                ids = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
                self.moe(0, hidden, ids, torch.zeros_like(ids, dtype=torch.float32))
                self.check()
        except BaseException:
            self.close()
            raise

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

    def close(self) -> None:
        """Waits for the GPU, then leaves the servers; seconds if one hangs. Idempotent."""
        links, self._links = self._links, []
        if links:
            torch.cuda.synchronize(self.device)
        for link in links:
            link.close()

    def __enter__(self) -> RemoteExperts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _peer(link: _Link, shape: SlotShape) -> Peer:
    assert link.requests is not None
    first = link.requests.addr
    return Peer(link.server.seat, link.server.experts,
                [first + i * shape.request_slot_bytes for i in range(shape.num_slots)])


def find_servers(registry: str, token: bytes, timeout: float) -> list[ServerInfo]:
    """The members, once together they hold every expert. Raises NoServerError, AuthError."""

    def staying(members: Members) -> list[ServerInfo]:
        return [server for server in members.servers if not server.draining]

    def missing(members: Members) -> set[int]:
        servers = staying(members)
        if not servers:
            return {0}
        held = {expert for server in servers for expert in server.experts}
        return set(range(servers[0].model["num_experts"])) - held

    membership = Membership(registry, token, client_name=f"client-{os.getpid()}")
    try:
        members = membership.wait(lambda members: not missing(members), timeout)
    except WaitTimeout as err:
        lacking = sorted(missing(membership.snapshot()))
        raise NoServerError(f"no server holds experts {lacking[:8]} within {timeout} s: {err}") \
            from None
    finally:
        membership.close()
    return staying(members)
