"""Experts on a GPU as a service for other processes of the host, over shared GPU memory.

Membership and authentication are those of every server (registry, token, Unix socket); what is
exchanged over the socket is one descriptor of GPU memory a side. After that no byte passes through
a CPU.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..config import ServerConfig
from ..control.frames import Channel, listen_unix, load_token
from ..errors import ConfigError, ExpertwireError, ProtocolError, WaitTimeout
from ..message import ReplyMode, SlotShape
from ..model.checkpoint import load_parts
from ..registry.membership import Lease
from ..server.client_link import check_request, refuse
from ..trace import recorder as trace
from .experts import GpuExperts
from .hca import GpuHca
from .launch import Launch
from .server import GpuServer
from .slots import make_slots
from .startup import Startup

log = logging.getLogger("expertwire.server.server")

HANDSHAKE_SECONDS = 5.0
CLOSE_SECONDS = 15.0
MEMORY_KIND = "cuda_fd"
WAIT_US = 200.0  # of one pass for a first message


def device_name(device: torch.device) -> str:
    """A GPU's name that is the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


class ExpertService:
    """Serves experts until it is closed; each client gets slots, a stream and a thread.

    model: the facts as for `Server`. registry: HOST:PORT. Raises AuthError for a token file that
    others can read.
    """

    def __init__(
        self, experts: GpuExperts, model: dict[str, Any], registry: str, *,
        token: bytes | None = None, name: str | None = None, config: ServerConfig | None = None,
        startup: Startup | None = None,
    ):
        self.shard, self.model = experts, model
        self.startup = startup or Startup()  # what `start` takes, and what came before
        self.name = name or f"server-{os.getpid()}"
        trace.join(self.name)
        self.config = config or ServerConfig()
        self.registry_address = registry
        self._token = load_token() if token is None else token
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._clients: dict[threading.Thread, Channel] = {}
        self._closed = False
        self._hca: GpuHca | None = None

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, experts: Sequence[int] | None, registry: str, *,
        device: torch.device, dtype: str | None = None,
        progress: Callable[[int, int], None] | None = None, **options: Any,
    ) -> ExpertService:
        """Some experts (None: all) of a Hugging Face checkpoint folder, on `device`.

        Read through CPU memory. Raises as `Server.from_checkpoint`.
        """
        startup = Startup()
        startup.mark("interpreter and imports")
        layers, ids, info = load_parts(path, experts, dtype=dtype, progress=progress)
        startup.mark("weights read")
        parts = [{name: tensor.to(device) for name, tensor in part.items()} for _, part in layers]
        held = GpuExperts([module for module, _ in layers], parts, ids, name=info.name)
        startup.mark("CUDA and weights moved")
        return cls(held, info.as_dict(), registry, startup=startup, **options)

    def start(self) -> ExpertService:
        """Compiles what is not in the caches, listens and registers. Returns itself.

        Does not wait for the registry.
        """
        with torch.cuda.device(self.shard.device):
            Launch([], device=self.shard.device.index)  # loads all of them
            self.startup.mark("kernels")
            self._warm_up()
        self.startup.mark("Triton and graphs")
        self._listener = listen_unix(self._token)
        self.lease = Lease(
            self.registry_address, self._token,
            {
                "name": self.name, "address": self._listener.address, "pid": os.getpid(),
                "model": self.model, "experts": self.shard.experts,
            },
            stats=lambda: {"clients": len(self._clients)}, on_drain=self._leave_if_unused,
        )
        self._accepting = threading.Thread(target=self._accept, name="gpu-accept", daemon=True)
        self._accepting.start()
        return self

    def _warm_up(self) -> None:
        """A pass of each kind of tile, so that no client waits for a compiler."""
        for mode, max_rows in ((ReplyMode.PER_EXPERT, 1), (ReplyMode.SUM, 1), (ReplyMode.SUM, 32)):
            element = self.shard.dtype.itemsize
            shape = SlotShape(
                num_slots=1, max_rows=max_rows, experts_per_row=1,
                hidden_size=self.shard.hidden_size, element_bytes=element, fp8=False,
                reply_mode=mode, reply_element_bytes=element,
            )
            server = GpuServer(self.shard, self.model["num_experts"], shape)
            server.connect(1, [server.target.alloc(shape.reply_slot_bytes).addr])
            server.close()

    def _leave_if_unused(self) -> None:
        """The registry asks this server to leave: it does once no client is connected."""
        with self._lock:
            if self.lease.draining and not self._clients:
                self._stop.set()

    @property
    def stopped(self) -> bool:
        """Whether it is closed, or has left because the registry asked it to."""
        return self._stop.is_set()

    def wait_registered(self, timeout: float = 5.0) -> str:
        """The id that the registry gave. Raises WaitTimeout, AuthError, ConfigError."""
        return self.lease.wait_registered(timeout)

    def serve_forever(self) -> None:
        """Blocks until `close`, or until the registry asks this server to leave."""
        self._stop.wait()

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                channel = self._listener.accept(0.5)
            except WaitTimeout:
                continue
            except OSError:
                return  # the listener was closed
            thread = threading.Thread(
                target=self._serve, args=(channel,), name="gpu-client", daemon=True
            )
            with self._lock:
                if self._stop.is_set() or len(self._clients) >= self.config.max_connections:
                    refuse(channel, "the server takes no more clients")
                    channel.close()
                    continue
                self._clients[thread] = channel
            thread.start()

    def _serve(self, channel: Channel) -> None:
        try:
            with torch.cuda.device(self.shard.device):
                self._admit(channel)
        except ExpertwireError as err:
            log.info("a client of %s: %s", self.name, err)
            refuse(channel, str(err))
        except Exception as err:  # our own bug ends this client, loudly, and no other
            log.exception("a client of %s", self.name)
            refuse(channel, f"{type(err).__name__}: {err}")
        finally:
            channel.close()
            with self._lock:
                self._clients.pop(threading.current_thread(), None)
            self._leave_if_unused()

    def _admit(self, channel: Channel) -> None:
        """One client from its request to its end."""
        request, fds = channel.recv(HANDSHAKE_SECONDS)
        experts, device = self.shard, self.shard.device
        slots = server = None
        try:
            shape = self._check(request)
            slots = make_slots(
                device, self._open_hca() if request.get("do_ibgda") else None,
                shape.num_slots * shape.request_slot_bytes,
                shape.num_slots * shape.reply_slot_bytes, self.config.reply_timeout,
            )
            taken, fds = fds, []
            slots.connect(request, taken)
            server = GpuServer(
                experts, self.model["num_experts"], shape, server_id=self.lease.seat,
                wait_us=WAIT_US, requests_addr=slots.own_addr,
            )
            server.connect(request["client_id"], [
                slots.peer_addr + i * shape.reply_slot_bytes for i in range(shape.num_slots)
            ], slots.endpoint)
            server.start()
            fields, offered = slots.offer()
            channel.send({
                "type": "connected", "server_id": self.lease.server_id or "",
                "device": device_name(device), **fields,
            }, offered)
            self._watch(channel, server)
        finally:
            for fd in fds:
                os.close(fd)
            if server is not None:
                server.close()
            if slots is not None:
                slots.close()

    def _open_hca(self) -> GpuHca:
        """The HCA of all clients with work queues, from the first one on."""
        with self._lock:
            if self._hca is None:
                self._hca = GpuHca(self.shard.device.index)
            return self._hca

    def _check(self, request: dict[str, Any]) -> SlotShape:
        """The slots that a client asks for. Raises ConfigError, ProtocolError."""
        if request.get("memory_kind") != MEMORY_KIND:
            raise ConfigError(
                "this server's experts are on a GPU, their memory is shared with clients on GPUs "
                "of this host: connect with --device cuda, or expertwire.cuda.remote.RemoteExperts"
            )
        shape = check_request(request, self.model, self.config)
        if shape.element_bytes != self.shard.dtype.itemsize:
            raise ConfigError(f"this server takes rows of {self.shard.dtype} only")
        return shape

    def _watch(self, channel: Channel, server: GpuServer) -> None:
        """Until the client leaves, dies, or this service closes."""
        while not self._stop.is_set():
            server.check()
            try:
                channel.recv(0.5)
                return  # it said that it leaves
            except WaitTimeout:
                continue
            except ProtocolError:
                return

    def close(self) -> None:
        """Leaves the registry, ends the clients' passes, frees their slots. Idempotent.

        Raises WaitTimeout if that takes longer than 15 s.
        """
        if self._closed:
            return
        self._closed = True
        self._stop.set()
        self.lease.close()
        self._listener.close()
        self._accepting.join(2)
        with self._lock:
            threads = list(self._clients)
        for thread in threads:
            thread.join(CLOSE_SECONDS)
        if self._hca is not None and not any(thread.is_alive() for thread in threads):
            self._hca.close()
        if any(thread.is_alive() for thread in threads):
            raise WaitTimeout(f"clients' passes did not end within {CLOSE_SECONDS} s", "close",
                              self.name)

    def __enter__(self) -> ExpertService:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()
