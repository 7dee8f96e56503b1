"""Keeps a client connected: follows the membership, connects to new servers, notices dead ones.

Runs in one background thread, and each connection is made in a thread of its own: a server that
joins, leaves, dies or hangs never makes the attention side, or the news of another server's death,
wait for a handshake. The hot path only reads `table`.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable

from ..config import ClientConfig
from ..errors import AuthError, ConfigError, ExpertwireError, NoServerError
from ..hca.interface import Hca
from ..message import SlotShape
from ..pacing import UNLIMITED
from ..registry.membership import Members, Membership, ServerInfo
from .link import ServerLink, open_link
from .patience import Patience
from .routing import RoutingTable

log = logging.getLogger("expertwire.client.client")

# Handshakes at a time: many clients that start together must not time out because each of them
# asks all servers at once. Those that failed before are tried aside, they may hang.
MAX_CONNECTING, MAX_RETRYING = 2, 4
RELEASE_SECONDS = 0.02  # between attempts to close what no batch uses any more


class Links:
    """The servers a client can use now, as an immutable routing table."""

    def __init__(
        self, hca: Hca, membership: Membership, *, token: bytes, client_id: int, name: str,
        config: ClientConfig, make_shape: Callable[[dict], SlotShape],
        release: Callable[[], None],
    ):
        self.hca = hca
        self.membership = membership
        self.model: dict | None = None
        self.shape: SlotShape | None = None
        self.table = RoutingTable(0, 0, [])
        self.retired: list[ServerLink] = []  # in no table; `release` closes them when unused
        self.released_epoch = 0  # set by `release`: no batch is routed by a table before it
        self.refusals: dict[str, str] = {}  # server id -> why it is not connected
        self.num_lost = 0
        self.credit = UNLIMITED  # the least of all servers': a batch may go to any of them
        self._token = token
        self._client_id = client_id
        self._name = name
        self._config = config
        self._make_shape = make_shape
        self._release = release
        self._links: dict[str, ServerLink] = {}
        self._last_holders: dict[int, str] = {}  # expert -> the last server that had it and is gone
        self._patience: dict[str, Patience] = {}  # by address: another process, another patience
        self._retry_at: dict[str, float] = {}  # by address
        self._connecting: dict[str, threading.Thread] = {}  # by address
        self._opened: collections.deque[tuple[ServerInfo, ServerLink | Exception]] = (
            collections.deque()
        )
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

    # ---------------------------------------------------------------- for the attention side

    def wait(self, ready: Callable[[RoutingTable], bool], timeout: float) -> RoutingTable:
        """The table once `ready` holds, or as it is when the time is over.

        Raises ConfigError once the client is closed, AuthError if the registry has another token.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while not ready(self.table):
                if self._stop.is_set():
                    raise ConfigError("the client was closed while it waited for servers")
                failure = self.membership.failure
                if isinstance(failure, AuthError) and not self.table.links:
                    raise AuthError(str(failure))
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(min(left, 0.1))
            return self.table

    def usable(self) -> RoutingTable:
        """The table without servers that were lost since it was made."""
        table = self.table
        lost = [link for link in table.links if link.lost]
        return table.without(lost) if lost else table

    def is_coming(self, experts: Iterable[int]) -> bool:
        """Whether a member that no attempt to connect has failed with yet holds one of them."""
        wanted = set(experts)
        connected = {link.address for link in self.table.links if not link.lost}
        return any(
            not wanted.isdisjoint(server.experts)
            for server in self.membership.snapshot().servers
            if server.server_id not in self.refusals and server.address not in connected
        )

    def mark_lost(self, link: ServerLink, why: str) -> None:
        """A batch found the server unusable: route around it and report, membership stays."""
        if not link.lost:
            self.refusals[link.server_id] = why
            self.num_lost += 1
            link.patience.failed()
            self._retry_at[link.address] = time.monotonic() + link.patience.pause()
            link.lost = True
            link.endpoint.peer_lost()
            self.hca.interrupt()  # whoever waits for it looks again
            log.warning("server %s lost: %s", link.server_id, why)
            self.membership.report(link.server_id, why)
        self.wake()

    def no_server_error(self, layer: int, missing: list[int]) -> NoServerError:
        """The error for a batch that needs experts which nobody reachable holds."""
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        holders = sorted({h for e in missing if (h := self._last_holders.get(e))})
        what = f"no reachable server holds expert {shown}" if missing else "no server is there"
        if holders:
            what += f", last held by {', '.join(holders)}"
        reasons = [f"{s}: {why}" for s, why in sorted(dict(self.refusals).items())]
        away = self.membership.failure
        if away is not None and not self.table.links:
            reasons.insert(0, f"registry: {away}")
        details = "; ".join([f"{len(self.usable().links)} servers connected", *reasons])
        return NoServerError(
            f"layer {layer}: {what} ({details}); start one with "
            "`expertwire serve MODEL --experts ...` or raise connect_timeout",
            layer, tuple(missing), tuple(holders),
        )

    def stop(self) -> None:
        """Ends all waiting: in `wait`, and for handshakes."""
        self._stop.set()
        self.wake()
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        self.stop()
        deadline = time.monotonic() + 1.5
        for thread in [self._thread, *self._connecting.values()]:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
        opened = [link for _, link in self._opened if isinstance(link, ServerLink)]
        for link in [*self._links.values(), *self.retired, *opened]:
            link.close()
        self._links.clear()
        self.retired.clear()
        self._opened.clear()
        self._wake_read.close()
        self._wake_write.close()

    # ---------------------------------------------------------------- in the background

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ, None)
            while not self._stop.is_set():
                for key, _ in selector.select(self._next_look()):
                    if key.data is None:
                        self._drain_wake()
                    else:
                        self._hear(selector, key.data)
                if self._stop.is_set():
                    return
                try:
                    self._follow(selector, self.membership.snapshot())
                    if self.is_holding:
                        self._release()
                    self.membership.acknowledge(self.released_epoch)
                except Exception:  # our own bug must not end all news for good
                    log.exception("following the membership failed")

    @property
    def is_holding(self) -> bool:
        """Whether there is something to let go of: connections, or older tables."""
        return bool(self.retired) or self.table.epoch > self.released_epoch

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_read.recv(4096):
                pass

    def _next_look(self) -> float:
        if self.is_holding:
            return RELEASE_SECONDS
        now = time.monotonic()
        waits = [at - now for at in list(self._retry_at.values()) if at > now]
        return max(0.01, min([1.0, *waits]))

    def _hear(self, selector: selectors.BaseSelector, link: ServerLink) -> None:
        """After the handshake a server says what credit it gives, and that it is gone."""
        try:
            link.hear()
            self.credit = _least_credit(self.table)
        except (ExpertwireError, OSError):
            selector.unregister(link.channel)
            self.mark_lost(link, "its connection closed")

    def _follow(self, selector: selectors.BaseSelector, members: Members) -> None:
        present = {server.server_id: server for server in members.servers}
        changed = self._take_opened(selector, present)
        gone = [link for link in self._links.values() if not self._is_current(link, present)]
        for link in self._links.values():
            server = present.get(link.server_id)
            if server is not None and link not in gone:
                changed |= self._update(link, server)
        self._retire(selector, gone, members.epoch)
        if changed or members.epoch != self.table.epoch:
            self._publish(members.epoch)
        # A server that is asked to leave goes once nobody is connected: let go of it when others
        # hold what it holds.
        self._retire(selector, self.table.idle_links, members.epoch)
        self._forget_absent(members)
        self._connect_to(members)

    def _is_current(self, link: ServerLink, present: dict[str, ServerInfo]) -> bool:
        server = present.get(link.server_id)
        return not link.lost and server is not None and server.address == link.address

    def _update(self, link: ServerLink, server: ServerInfo) -> bool:
        """Takes over what the registry says of a connected server; whether that is news."""
        experts = list(server.experts)
        if link.draining == server.draining and link.experts == experts:
            return False
        link.draining, link.experts = server.draining, experts
        return True

    def _retire(
        self, selector: selectors.BaseSelector, gone: list[ServerLink], epoch: int
    ) -> None:
        if not gone:
            return
        for link in gone:
            if link.channel.fileno() in selector.get_map():
                selector.unregister(link.channel)
            self._last_holders.update(dict.fromkeys(link.experts, link.server_id))
            del self._links[link.server_id]
        # First no table holds them, then they may be closed: never the other way round.
        self._publish(epoch)
        self.retired += gone

    def _forget_absent(self, members: Members) -> None:
        ids = {server.server_id for server in members.servers}
        addresses = {server.address for server in members.servers}
        for server_id in [s for s in list(self.refusals) if s not in ids]:  # also changed elsewhere
            self.refusals.pop(server_id, None)
        for known in (self._retry_at, self._patience):
            for address in [a for a in list(known) if a not in addresses]:
                known.pop(address, None)

    def _connect_to(self, members: Members) -> None:
        staying = {e for s in members.servers if not s.draining and s.server_id not in self.refusals
                   for e in s.experts}
        room = {True: MAX_RETRYING, False: MAX_CONNECTING}  # by whether it failed before
        for address in self._connecting:
            room[address in self._retry_at] -= 1
        now = time.monotonic()
        # Clients that start together begin with different servers.
        begin = self._client_id % max(1, len(members.servers))
        for server in members.servers[begin:] + members.servers[:begin]:
            if server.server_id in self._links or server.address in self._connecting:
                continue
            again = server.address in self._retry_at
            if room[again] <= 0 or now < self._retry_at.get(server.address, 0.0):
                continue
            if server.draining and staying.issuperset(server.experts):
                continue
            # The keys of whoever had the seat before are revoked first.
            if any(link.seat == server.seat and link.address != server.address
                   for link in self.retired):
                continue
            if self._stop.is_set():
                return
            try:
                self._adopt_model(server.model)
            except (ExpertwireError, KeyError, TypeError, ValueError) as err:
                self._refused(server, err)
                continue
            room[again] -= 1
            self._connecting[server.address] = thread = threading.Thread(
                target=self._open, args=(server, self._patience_with(server.address)),
                name="expertwire-connect", daemon=True,
            )
            thread.start()

    def _patience_with(self, address: str) -> Patience:
        patience = self._patience.get(address)
        if patience is None:
            patience = self._patience[address] = Patience(self._config.reply_timeout)
        return patience

    def _open(self, server: ServerInfo, patience: Patience) -> None:
        assert self.shape is not None
        try:
            link = open_link(
                self.hca, server, token=self._token, client_id=self._client_id,
                client_name=self._name, shape=self.shape, config=self._config,
                fingerprint=server.model["fingerprint"], patience=patience, stopped=self._stop,
                registry=self.membership.address,
            )
        except (ExpertwireError, OSError, KeyError, TypeError, ValueError) as err:
            self._opened.append((server, err))
        else:
            self._opened.append((server, link))
        self.wake()

    def _take_opened(
        self, selector: selectors.BaseSelector, present: dict[str, ServerInfo]
    ) -> bool:
        """Results of attempts to connect; whether there is a new link."""
        changed = False
        while self._opened:
            server, link = self._opened.popleft()
            self._connecting.pop(server.address).join()
            if not isinstance(link, ServerLink):
                self._refused(server, link)
            elif server.server_id in self._links or not self._is_current(link, present):
                link.close()  # it was never in a table
            else:
                self._retry_at.pop(server.address, None)
                self.refusals.pop(server.server_id, None)
                self._links[server.server_id] = link
                selector.register(link.channel, selectors.EVENT_READ, link)
                changed = True
        return changed

    def _refused(self, server: ServerInfo, err: Exception) -> None:
        patience = self._patience_with(server.address)
        patience.failed()
        self.refusals[server.server_id] = str(err)
        self._retry_at[server.address] = time.monotonic() + patience.pause()
        log.info("connecting to server %s failed: %s", server.server_id, err)
        with self._changed:  # whoever waits for it may look elsewhere
            self._changed.notify_all()

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
            self.credit = _least_credit(self.table)
            self._changed.notify_all()


def _least_credit(table: RoutingTable) -> int:
    return min((link.credit for link in table.links), default=UNLIMITED)
