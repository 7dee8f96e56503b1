"""Keeps a client connected: follows the membership, connects to new servers, notices dead ones.

Runs in one background thread, so that a server that joins, leaves or dies never makes the
attention side wait for a handshake. The hot path only reads `table`.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable

from .config import ClientConfig
from .errors import ConfigError, ExpertwireError, NoServerError
from .hca.interface import Hca
from .link import ServerLink, open_link
from .membership import Members, Membership, ServerInfo
from .message import SlotShape
from .routing import RoutingTable

log = logging.getLogger("expertwire.client")

RETRY_SECONDS = 0.2  # first pause before a refused connection is tried again; doubles up to 5 s


class Links:
    """The servers a client can use now, as an immutable routing table."""

    def __init__(
        self, hca: Hca, membership: Membership, *, token: bytes, client_id: int, name: str,
        config: ClientConfig, make_shape: Callable[[dict], SlotShape],
    ):
        self.hca = hca
        self.membership = membership
        self.model: dict | None = None
        self.shape: SlotShape | None = None
        self.table = RoutingTable(0, 0, [])
        self.retired: list[ServerLink] = []  # closed by the client once no batch uses them
        self.refusals: dict[str, str] = {}  # server id -> why connecting failed
        self._token = token
        self._client_id = client_id
        self._name = name
        self._config = config
        self._make_shape = make_shape
        self._links: dict[str, ServerLink] = {}
        self._retry_at: dict[str, tuple[float, float]] = {}
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="expertwire-links", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self, *_: object) -> None:
        """Looks at the membership soon (its change callback)."""
        with contextlib.suppress(OSError):  # closing
            self._wake_write.send(b"x")

    def wait(self, ready: Callable[[RoutingTable], bool], timeout: float) -> RoutingTable:
        """The table once `ready` holds, or as it is when the time is over.

        Raises ConfigError once the client is closed.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while not ready(self.table):
                if self._stop.is_set():
                    raise ConfigError("the client was closed while it waited for servers")
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return self.table

    def mark_lost(self, link: ServerLink, why: str) -> None:
        """A batch found the server unusable: route around it and report, membership stays."""
        if not link.lost:
            link.lost = True
            log.warning("server %s lost: %s", link.server_id, why)
            self.membership.report(link.server_id, why)
        link.endpoint.peer_lost()
        self.wake()

    def stop(self) -> None:
        """Ends all waiting: in `wait`, and for handshakes."""
        self._stop.set()
        self.wake()
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        self.stop()
        if self._thread.is_alive():
            self._thread.join(1.5)
        for link in [*self._links.values(), *self.retired]:
            link.close()
        self._links.clear()
        self.retired.clear()
        self._wake_read.close()
        self._wake_write.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ, None)
            while not self._stop.is_set():
                for key, _ in selector.select(self._next_retry()):
                    if key.data is None:
                        self._drain_wake()
                    else:
                        self._end_of_file(selector, key.data)
                if not self._stop.is_set():
                    self._follow(selector, self.membership.snapshot())

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_read.recv(4096):
                pass

    def _next_retry(self) -> float:
        now = time.monotonic()
        waits = [at - now for at, _ in self._retry_at.values()]
        return max(0.01, min([1.0, *waits]))

    def _end_of_file(self, selector: selectors.BaseSelector, link: ServerLink) -> None:
        """A server sends nothing after the handshake, so readable means closed."""
        selector.unregister(link.channel)
        self.mark_lost(link, "its connection closed")
        self.hca.interrupt()

    def _follow(self, selector: selectors.BaseSelector, members: Members) -> None:
        present = {server.server_id: server for server in members.servers}
        changed = False
        gone: list[ServerLink] = []
        for server_id, link in list(self._links.items()):
            if link.lost or server_id not in present:
                if link.channel.fileno() in selector.get_map():
                    selector.unregister(link.channel)
                del self._links[server_id]
                gone.append(link)
                changed = True
        if gone:
            # First no table holds them, then they may be closed: never the other way round.
            self._publish(members.epoch)
            self.retired += gone
        for server_id in [s for s in self._retry_at if s not in present]:
            del self._retry_at[server_id]
            self.refusals.pop(server_id, None)
        for server in present.values():
            if self._stop.is_set():
                return
            if server.server_id in self._links or server.draining:
                continue
            if self._try_connect(selector, server):
                changed = True
                self._publish(members.epoch)  # usable at once, while others are still connected to
        if changed or members.epoch != self.table.epoch:
            self._publish(members.epoch)

    def _try_connect(self, selector: selectors.BaseSelector, server: ServerInfo) -> bool:
        at, pause = self._retry_at.get(server.server_id, (0.0, RETRY_SECONDS))
        if time.monotonic() < at:
            return False
        try:
            self._adopt_model(server.model)
            assert self.shape is not None
            link = open_link(
                self.hca, server, token=self._token, client_id=self._client_id,
                client_name=self._name, shape=self.shape, config=self._config,
                fingerprint=server.model["fingerprint"], stopped=self._stop,
            )
        except (ExpertwireError, OSError, KeyError, TypeError, ValueError) as err:
            self.refusals[server.server_id] = str(err)
            self._retry_at[server.server_id] = (time.monotonic() + pause, min(pause * 2, 5.0))
            log.info("connecting to server %s failed: %s", server.server_id, err)
            return False
        self._retry_at.pop(server.server_id, None)
        self.refusals.pop(server.server_id, None)
        self._links[server.server_id] = link
        selector.register(link.channel, selectors.EVENT_READ, link)
        return True

    def _adopt_model(self, model: dict) -> None:
        if self.model is None:
            self.shape = self._make_shape(model)
            self.model = model
        elif model["fingerprint"] != self.model["fingerprint"]:
            raise ConfigError(
                f"the server's model is {model.get('name')}, this client uses "
                f"{self.model.get('name')}; one registry serves one model"
            )

    def _publish(self, epoch: int) -> None:
        num_experts = self.model["num_experts"] if self.model else 0
        with self._changed:
            self.table = RoutingTable(epoch, num_experts, self._links.values())
            self._changed.notify_all()

    def no_server_error(self, layer: int, missing: list[int]) -> NoServerError:
        """The error for a batch that needs experts which nobody reachable holds."""
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        reasons = "; ".join(f"{s}: {why}" for s, why in sorted(self.refusals.items()))
        away = self.membership.failure
        if away is not None and not self.table.links:
            reasons = "; ".join(filter(None, [f"registry: {away}", reasons]))
        what = f"no reachable server holds expert {shown}" if missing else "no server is there"
        return NoServerError(
            f"layer {layer}: {what} ({len(self.table.links)} servers connected"
            f"{'; ' + reasons if reasons else ''}); start one with "
            "`expertwire serve MODEL --experts ...` or raise connect_timeout",
            layer, tuple(missing),
        )


