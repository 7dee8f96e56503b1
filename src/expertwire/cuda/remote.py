"""A client on a GPU of experts that other processes of the host hold on theirs."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from ..client.link import DATA_PROTOCOL
from ..control.frames import Channel, connect_unix, load_token
from ..device_structs import SIGNAL_WRITE
from ..errors import ConfigError, ExpertwireError, NoServerError, ProtocolError, WaitTimeout
from ..message import ReplyMode, SlotShape, dtype_of
from ..registry.membership import Members, Membership, ServerInfo
from ..trace import recorder as trace
from .client import GpuClient, Peer
from .hca import GpuHca
from .layers import GpuLayers
from .service import MEMORY_KIND, device_name
from .slots import Slots, make_slots

log = logging.getLogger("expertwire.client.client")

LEAVE_SECONDS = 5.0


class _Link:
    """One server: its channel and the slots of the connection."""

    def __init__(
        self, server: ServerInfo, request: dict[str, Any], shape: SlotShape, token: bytes,
        device: torch.device, hca: GpuHca | None, deadline: float,
    ):
        self.server, self.shape = server, shape
        self.slots: Slots | None = None
        self.channel: Channel = connect_unix(server.address, token, _left(deadline))
        try:
            self.slots = make_slots(device, hca, shape.num_slots * shape.reply_slot_bytes,
                                    shape.num_slots * shape.request_slot_bytes)
            fields, fds = self.slots.offer()
            self.channel.send({**request, **fields}, fds)
            reply, fds = self.channel.recv(_left(deadline))
            self._check(reply, fds)
            self.slots.connect(reply, fds)
            self.is_here = reply.get("device") == device_name(device)
        except BaseException:
            self.close()
            raise

    def _check(self, reply: dict[str, Any], fds: list[int]) -> None:
        name = self.server.server_id
        if reply.get("type") == "connected":
            return
        for fd in fds:
            os.close(fd)
        if reply.get("type") == "error":
            raise ConfigError(f"server {name} refused the connection: "
                              f"{reply.get('reason', 'no reason given')}")
        raise ProtocolError(f"server {name} answered {reply.get('type')!r}")

    def peer(self) -> Peer:
        """The server as the client takes it."""
        assert self.slots is not None
        first, size = self.slots.peer_addr, self.shape.request_slot_bytes
        return Peer(self.server.seat, self.server.experts,
                    [first + i * size for i in range(self.shape.num_slots)], self.slots.endpoint)

    def close(self) -> None:
        """Lets go of the memory of both, and waits until the server has. Idempotent."""
        slots, self.slots = self.slots, None
        if slots is not None:
            slots.close()
        with contextlib.suppress(ExpertwireError):
            self.channel.send({"type": "leave"}, timeout=1.0)
            deadline = time.monotonic() + LEAVE_SECONDS
            while True:  # until the server closes its end, which it does last
                self.channel.recv(_left(deadline))
        self.channel.close()


class _Watch:
    """A thread that tells the client of connections that end; a server sends nothing by itself."""

    def __init__(self, client: GpuClient, links: Sequence[_Link]):
        self._client, self._links = client, links
        self._wake, theirs = socket.socketpair()
        self._thread = threading.Thread(target=self._run, args=(theirs,), name="gpu-links",
                                        daemon=True)
        self._thread.start()

    def _run(self, wake: socket.socket) -> None:
        with wake, selectors.DefaultSelector() as selector:
            selector.register(wake, selectors.EVENT_READ, -1)
            for idx, link in enumerate(self._links):
                selector.register(link.channel, selectors.EVENT_READ, idx)
            while True:
                for key, _ in selector.select():
                    if key.data < 0:
                        return
                    selector.unregister(key.fileobj)
                    self._client.disconnected(key.data)
                    log.warning("server %s: its connection closed; its experts' replicas are used",
                                self._links[key.data].server.server_id)

    def close(self) -> None:
        self._wake.close()
        self._thread.join(5)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


class RemoteExperts(GpuLayers):
    """All experts of a model, held by servers of this host (`expertwire serve --device cuda`).

    registry: HOST:PORT. device: of this client, default torch's current one. token: default as for
    `Client`. Other arguments as for `LocalExperts`; connect_timeout: seconds to find servers for
    every expert and connect to them. The servers are those that are there now.

    A server that dies or is silent for `timeout` seconds is not used again: where each of its
    experts has a replica, its rows of the batch under way go there, in the same step, also in CUDA
    graphs; else the client fails. `lost_servers` tells.

    do_ibgda: messages go through work queues that an HCA kernel on one multiprocessor executes
    (hca.py), as they would through an adapter; else kernels write into the servers' slots.

    fp8: rows travel as e4m3 with a scale per 128 elements; lossy.

    Use it as `LocalExperts`: `moe`, `dispatch`, `check`, `expertwire.transformers.attach`. Raises
    NoServerError, WaitTimeout, AuthError, ConfigError, HcaError where memory cannot be shared.
    """

    def __init__(
        self, registry: str, *, device: torch.device | int | None = None,
        token: bytes | None = None, max_rows: int = 256, num_slots: int = 2,
        batch_invariant: bool = True, timeout: float = 5.0, connect_timeout: float = 10.0,
        do_ibgda: bool = False, fp8: bool = False,
    ):
        self.refuse_capture()
        self.device = gpu_device(device)
        self._registry, self._token = registry, load_token() if token is None else token
        self._max_rows, self._num_slots = max_rows, num_slots
        self._reply_mode = ReplyMode.PER_EXPERT if batch_invariant else ReplyMode.SUM
        self._timeout, self._connect_timeout = timeout, connect_timeout
        self._do_ibgda, self._fp8 = do_ibgda, fp8
        self._hca: GpuHca | None = None
        self._links: list[_Link] = []
        self._watch: _Watch | None = None
        trace.join(f"client-{os.getpid()}")
        self._connect()

    def _connect(self) -> None:
        deadline = time.monotonic() + self._connect_timeout
        servers = find_servers(self._registry, self._token, self._connect_timeout)
        self.model_info = model = servers[0].model
        shape = self._shape(model)
        client_id = 1 + secrets.randbelow((1 << 32) - 1)
        request = {
            "type": "connect", "data_protocol": DATA_PROTOCOL, "memory_kind": MEMORY_KIND,
            "client_id": client_id, "client": f"client-{os.getpid()}",
            "fingerprint": model["fingerprint"], "shape": dataclasses.asdict(shape),
            "num_qps": 1, "signal_mode": SIGNAL_WRITE, "do_ibgda": self._do_ibgda,
        }
        try:
            with torch.cuda.device(self.device):
                if self._do_ibgda:
                    self._hca = GpuHca(self.device.index)
                for server in servers:
                    self._links.append(_Link(server, request, shape, self._token, self.device,
                                             self._hca, deadline))
                self.client = GpuClient(
                    model, [link.peer() for link in self._links], shape, self.device,
                    client_id=client_id, timeout=self._timeout,
                    waits_apart=any(link.is_here for link in self._links),
                    reply_addrs=[link.slots.own_addr for link in self._links if link.slots],
                )
                self._watch = _Watch(self.client, self._links)
                self.warm_up()
        except BaseException:
            self.close()
            raise

    def _shape(self, model: dict[str, Any]) -> SlotShape:
        element = dtype_of(model["dtype"]).itemsize
        return SlotShape(
            num_slots=self._num_slots, max_rows=self._max_rows, experts_per_row=model["top_k"],
            hidden_size=model["hidden_size"], element_bytes=element, fp8=self._fp8,
            reply_mode=self._reply_mode, reply_element_bytes=element,
        )

    def is_ready(self) -> bool:
        """Whether the next batch can be answered, as far as is known without asking the GPU."""
        return bool(self._links) and not self.client.has_failed

    def recover(self) -> None:
        """After a failure: connects to the servers that are there now; else nothing.

        CUDA graphs that were captured before must not be replayed after. Raises as the constructor.
        """
        if not self.is_ready():
            self.close()
            self._connect()

    def stats(self) -> dict[str, Any]:
        """Servers by id with seat and number of experts, and which of them are lost; with work
        queues also what the HCA has done."""
        return {
            "servers": {link.server.server_id: {"seat": link.server.seat,
                                                "experts": len(link.server.experts)}
                        for link in self._links},
            "lost": self.lost_servers(), "skipped_ids": self.client.num_skipped,
            **({"hca": self._hca.stats()} if self._hca else {}),
        }

    def lost_servers(self) -> list[str]:
        """Ids of the servers that are not used any more."""
        seats = set(self.client.lost_servers())
        return [link.server.server_id for link in self._links if link.server.seat in seats]

    def close(self) -> None:
        """Waits for the GPU, then leaves the servers; seconds if one hangs. Idempotent."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        links, self._links = self._links, []
        if links:
            torch.cuda.synchronize(self.device)
        for link in links:
            link.close()
        hca, self._hca = self._hca, None
        if hca is not None:
            hca.close()


def gpu_device(device: torch.device | int | None) -> torch.device:
    """A GPU with its index; None: torch's current one."""
    if isinstance(device, torch.device) and device.index is not None:
        return device
    index = device if isinstance(device, int) else torch.cuda.current_device()
    return torch.device("cuda", index)


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
