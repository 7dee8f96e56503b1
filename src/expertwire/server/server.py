"""An expert server: holds experts, polls its clients' flags, computes, pushes results back.

Stateless: everything a batch needs is in the message. It starts alone, registers what it holds,
and can leave at any time.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..config import ServerConfig
from ..control.data_address import listen_data
from ..control.frames import Channel, load_token
from ..errors import CheckpointError, ConfigError, ExpertwireError, WaitTimeout
from ..hca import open_hca
from ..observe.reports import server_report
from ..registry.lease import Lease
from ..trace import recorder as trace
from .batch import Batcher, Experts
from .client_link import ClientLink, admit, refuse, share_credit
from .mover import LoadExperts, Mover

if TYPE_CHECKING:
    from ..registry.registry import Registry
    from .experts import ExpertShard

log = logging.getLogger("expertwire.server.server")

REQUEST_SECONDS = 10.0  # for a client's request, once it has proved itself
CLOSE_SECONDS = 4.0


class Server:
    """Serves a shard of experts until it is closed.

        with Server.from_checkpoint(path, range(8), registry) as server:    # starts, and closes
            server.wait_registered()

    shard: experts.ExpertShard (checkpoint.load_experts makes one), or echo.EchoShard.
    model: the model's facts as a dict: fingerprint, name, num_layers, num_experts, hidden_size,
        top_k, dtype.
    registry: "HOST:PORT" or a running Registry; it need not be up yet.
    token: the shared secret, at least 16 bytes; default: EXPERTWIRE_TOKEN or the token file.
    name: shown in status, and the id unless it is taken; default server-PID.
    config: ServerConfig; single settings may be given as keywords instead.
    load: reads more experts of the model by their ids, for `expertwire rebalance`.

    Raises ConfigError for settings that do not fit, AuthError for a token file that others can
    read.
    """

    def __init__(
        self, shard: Experts, model: dict[str, Any], registry: str | Registry, *,
        token: bytes | None = None, name: str | None = None, config: ServerConfig | None = None,
        load: LoadExperts | None = None, **settings: Any,
    ):
        if config is not None and settings:
            raise ConfigError("give either config or single settings, not both")
        self.config = config or ServerConfig(**settings)
        self.shard = shard
        self.model = model
        self.name = name or f"server-{os.getpid()}"
        self.registry_address = registry if isinstance(registry, str) else registry.address
        self._token = load_token() if token is None else token
        self.mover = Mover(self, load)
        self._stop = threading.Event()
        self._close_lock = threading.RLock()  # a signal handler may close while close runs
        self._closed = False
        self._started = False
        self._clients: list[ClientLink] = []
        self._inbox: collections.deque[Callable[[], None]] = collections.deque()
        self._admitting: set[Channel] = set()  # connections whose request is being answered
        self._admitting_changed = threading.Condition()
        self._credit_due = False
        self._to_watch: collections.deque[ClientLink] = collections.deque()
        self._threads: list[threading.Thread] = []
        self.error: BaseException | None = None

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, experts: Sequence[int] | None, registry: str | Registry, *,
        dtype: str | None = None, progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> Server:
        """A server of some experts (None: all) of a Hugging Face checkpoint folder.

        experts: ids from 0; the same ones of every MoE layer. Reads only their tensors. dtype:
        "float32", "bfloat16" or "float16" to keep them and compute in, default as the checkpoint
        says. progress(done, total): called with bytes. options: as for Server(...).

        Raises CheckpointError for a folder that is damaged or of a family that cannot be served,
        ConfigError for experts that it does not have.
        """
        from ..model.checkpoint import inspect_model, load_experts

        model = inspect_model(path)
        shard = load_experts(path, experts, dtype=dtype, progress=progress)
        facts = {**model.as_dict(), "dtype": str(shard.dtype).removeprefix("torch.")}

        def load(more: Sequence[int]) -> ExpertShard:
            if inspect_model(path).fingerprint != model.fingerprint:
                raise CheckpointError(f"{path} is not the checkpoint any more that is served")
            return load_experts(path, more, dtype=shard.dtype)

        return cls(shard, facts, registry, load=load, **options)

    def start(self) -> Server:
        """Begins to listen, registers, and serves in background threads. Returns itself.

        Does not wait for the registry (`wait_registered` does). Raises ConfigError if it was
        started before.
        """
        if self._started:
            raise ConfigError("the server was started already")
        if self.config.num_threads:
            torch.set_num_threads(self.config.num_threads)
        self.batcher = Batcher(self.shard, self.model, self.config)
        self._listener = listen_data(
            self.config.hca, self.config.listen, self.registry_address, self._token
        )
        self._watched = selectors.DefaultSelector()
        self._watch_wake = socket.socketpair()
        for end in self._watch_wake:
            end.setblocking(False)
        self._watched.register(self._watch_wake[0], selectors.EVENT_READ, None)
        try:
            self.hca = open_hca(self.config.hca, local_address=self._listener.data_host)
        except ExpertwireError:
            self._listener.close()
            raise
        self._started = True
        trace.join(self.name)
        self.lease = Lease(
            self.registry_address, self._token,
            {
                "name": self.name, "address": self._listener.address, "pid": os.getpid(),
                "model": self.model, "experts": [int(e) for e in self.shard.experts],
                "room": self.config.room,
            },
            stats=self.stats, on_drain=self._drain, on_leave=self.close, on_place=self.mover.place,
        )
        for work in (self._accept_loop, self._data_loop, self._watch_loop):
            thread = threading.Thread(target=work, name=f"expertwire{work.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    @property
    def server_id(self) -> str:
        """The registry's name for this server, "" until it is registered."""
        return self.lease.server_id or ""

    def wait_registered(self, timeout: float = 5.0) -> str:
        """Waits until the registry knows this server; returns its id. Raises WaitTimeout after
        `timeout` seconds, AuthError, or ConfigError if it was refused (another model).
        """
        return self.lease.wait_registered(timeout)

    def stats(self) -> dict[str, Any]:
        """Counters since the start; goes to the registry with each heartbeat."""
        return server_report(self)

    @property
    def num_clients(self) -> int:
        """Clients that are connected now."""
        return len(self._clients)

    def use_shard(self, shard: Experts, done: Callable[[], None]) -> None:
        """The data thread goes over to these experts between two batches, then calls `done`."""

        def swap() -> None:
            self.batcher.set_shard(shard)
            self.shard = shard
            done()

        self._post(swap)

    def close(self) -> None:
        """Leaves the registry, answers what it has taken, gives everything back. Idempotent.

        Takes under 5 s. Raises WaitTimeout if the experts are not through with their batch by then:
        clients are told, the memory stays until the process ends.
        """
        with self._close_lock:
            if not self._started or self._closed:
                return
            self._closed = True
            deadline = time.monotonic() + CLOSE_SECONDS
            self.lease.close()
            self._stop.set()
            self._listener.close()
            self.hca.interrupt()
            self._wake_watch()
            with self._admitting_changed:  # nobody may make queue pairs once the HCA closes
                for channel in self._admitting:
                    channel.close()
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            self.mover.close(max(0.0, deadline - time.monotonic()))
            with self._admitting_changed:
                left = max(0.0, deadline - time.monotonic())
                self._admitting_changed.wait_for(lambda: not self._admitting, left)
            if self._admitting or any(thread.is_alive() for thread in self._threads):
                for link in self._clients:
                    link.channel.close()
                raise WaitTimeout(
                    f"the server's threads did not end within {CLOSE_SECONDS} s of closing it",
                    "close", self.name,
                )
            for end in self._watch_wake:
                end.close()
            while self._inbox:
                self._inbox.popleft()()
            for link in self._clients:
                link.close()
            self._clients.clear()
            self.hca.close()

    def _drain(self) -> None:
        """The registry asks this server to leave: it does once no client is connected.

        Clients let go of a draining server when others hold its experts and nothing is in flight
        to it; until then it serves on.
        """
        self._post(self._leave_if_unused)

    def _leave_if_unused(self) -> None:
        if self._closed or not self.lease.draining:
            return
        if not self._clients and not self._admitting:
            log.info("drained: no client is connected any more")
            # Not from the data thread: closing waits for it.
            threading.Thread(target=self.close, name="expertwire-drained").start()

    @property
    def stopped(self) -> bool:
        """Whether it has ended, or is about to: by `close` or an error of its own."""
        return self._stop.is_set()

    def serve_forever(self) -> None:
        """Blocks until `close` is called (from a signal handler or another thread).

        Raises what ended the data thread, if it was not `close`.
        """
        self._stop.wait()
        if self.error is not None:
            raise self.error

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- connections

    def _accept_loop(self) -> None:
        while not self._stop.is_set():
            try:
                channel = self._listener.accept(0.5)
            except WaitTimeout:
                continue
            except ExpertwireError as err:
                log.info("refused a connection: %s", err)
                continue
            except OSError:
                return  # the listener was closed
            with self._admitting_changed:
                num_clients = len(self._clients) + len(self._admitting)
                if self._stop.is_set():
                    channel.close()
                    return
                if num_clients < self.config.max_connections:
                    self._admitting.add(channel)
            if num_clients >= self.config.max_connections:
                refuse(channel, f"the server has {num_clients} clients, its limit")
                channel.close()
                continue
            # A client that stalls here holds up nobody: a thread of its own, bounded in time.
            threading.Thread(target=self._admit, args=(channel,), daemon=True).start()

    def _admit(self, channel: Channel) -> None:
        try:
            link = admit(
                self.hca, channel, model=self.model, server_id=self.server_id, config=self.config,
                timeout=REQUEST_SECONDS, others=self._clients,
            )
            self._post(lambda: self._add(link))
            self._to_watch.append(link)
            self._wake_watch()
        except ExpertwireError as err:
            log.info("refused a client: %s", err)
            self._post(self._leave_if_unused)
            return
        finally:
            with self._admitting_changed:
                self._admitting.discard(channel)
                self._admitting_changed.notify_all()

    def _wake_watch(self) -> None:
        with contextlib.suppress(OSError):  # closing, or awake anyway
            self._watch_wake[1].send(b"x")

    def _watch_loop(self) -> None:
        """Notices clients that go. They say nothing after the handshake: end-of-file ends them."""
        with self._watched as selector:
            while not self._stop.is_set():
                for key, _ in selector.select(0.5):
                    if key.data is None:
                        with contextlib.suppress(BlockingIOError):
                            self._watch_wake[0].recv(4096)
                    else:
                        self._hear(key.fd, key.data)
                if self._credit_due:
                    self._credit_due = False
                    for link in share_credit(list(self._clients), self.config):
                        self._post(lambda link=link: self._remove(link))
                while self._to_watch:
                    link = self._to_watch.popleft()
                    fd = link.channel.fileno()
                    if fd < 0:  # closed already, by the data thread
                        continue
                    if fd in selector.get_map():  # of a link that was closed elsewhere
                        selector.unregister(fd)
                    with contextlib.suppress(OSError):  # closed just now
                        selector.register(fd, selectors.EVENT_READ, link)

    def _hear(self, watched_fd: int, link: ClientLink) -> None:
        try:
            _, fds = link.channel.recv(0.0)
            for fd in fds:
                os.close(fd)
        except WaitTimeout:
            return
        except (ExpertwireError, OSError):
            self._watched.unregister(watched_fd)
            self._post(lambda: self._remove(link))

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self.hca.interrupt()

    def _add(self, link: ClientLink) -> None:
        self._clients.append(link)

    def _clients_changed(self) -> None:
        self.batcher.set_clients(self._clients)
        self._credit_due = True
        self._wake_watch()

    def _remove(self, link: ClientLink) -> None:
        if link in self._clients:
            self._clients.remove(link)
            self._clients_changed()
            assert link.endpoint is not None
            link.endpoint.peer_lost()
            link.close()
            self._leave_if_unused()

    # ---------------------------------------------------------------- data

    def _data_loop(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stop.is_set():
                    self._serve_once()
        except BaseException as err:  # our own bug: end loudly instead of serving nobody
            log.exception("the data thread ended")
            self.error = err
            self._stop.set()
            # A member that serves nobody is worse than none: everybody is told, by end-of-file.
            self.lease.close()
            self._listener.close()
            for link in self._clients:
                link.close()
            self._clients.clear()

    def _serve_once(self) -> None:
        while self._inbox:
            self._inbox.popleft()()
        if len(self._clients) != self.batcher.num_clients:  # one table for all that come together
            self._clients_changed()
        broken = self.batcher.serve(
            self.hca, self.lease.epoch, self.lease.seat, int(self.config.idle_timeout * 1e9)
        )
        for link in broken:
            self._remove(link)
