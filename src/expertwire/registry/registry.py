"""The registry: which servers are there, what they hold, and since when.

Membership only; no data passes through it. A server's connection is its lease: end-of-file ends
membership at once, silence ends it after `lease_seconds`, and a server that is slow but sends
heartbeats stays. The rules are in roster.py; this is the server that speaks them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import secrets
import threading
import time
from pathlib import Path
from typing import Any

from ..control import frames as control
from ..control import tls
from ..control.credentials import printable
from ..errors import AuthError, ConfigError, ExpertwireError, ProtocolError, WaitTimeout
from ..observe.reports import with_rates
from . import moves
from .facts import client_name, members_message, status_message
from .roster import Member, Plan, Roster, check_stats

log = logging.getLogger("expertwire.registry.registry")

MAX_CONNECTIONS = 4096
SPARE_FDS = 64  # of the process' limit, for everything that is not a connection
MAX_HANDSHAKES = 512  # connected but not authenticated yet
# A connection that neither watches nor registers has this long for its next question.
IDLE_SECONDS = 60.0
# Changes that come together go out together, and lists are sent to all watchers no faster than they
# can be read: a server more is a list more for every client, and lists grow with the servers.
BROADCAST_SECONDS = 0.002
BROADCAST_BYTES_PER_SECOND = 20e6
# After a start, servers of a registry that ran here before need this long to come back: longer
# than the longest pause between their attempts (membership.LONGEST_PAUSE).
SETTLE_SECONDS = 5.0


class _Peer:
    """One connection."""

    def __init__(self, writer: asyncio.StreamWriter):
        self.writer = writer
        self.since = time.monotonic()
        self.authenticated = False
        self.watching: str | None = None  # the client's name
        self.stats: dict[str, Any] = {}  # a client's last report
        self.seen = 0  # epoch of the oldest list that the client still routes by
        self.member: Member | None = None
        self.plan: Plan | None = None
        self.mover = ""  # who it is, if it is the one that moves experts


class Registry:
    """An asyncio server in a thread of its own (`start`) or in the foreground (`serve_forever`).

        with Registry("127.0.0.1:0") as registry:      # or registry.start() ... registry.close()
            print(registry.address)

    listen: "HOST:PORT"; port 0 picks a free one, `address` tells which.
    token: the shared secret, at least 16 bytes; default: EXPERTWIRE_TOKEN or the token file.
    lease_seconds: silence after which a server is removed.
    state_path: where epoch and next seat are kept over restarts; without it a restarted registry
        starts its epoch from the wall clock in milliseconds, which grows too.
    settle_seconds: how long after the start clients keep servers of an earlier registry.
    max_connections: default 4096, or what the limit of open files leaves.
    handshake_seconds: for a connection to prove that it knows the token.
    tls_cert, tls_key: PEM files; default: EXPERTWIRE_TLS_CERT and _KEY, without them no TLS.

    Raises ConfigError for a malformed address, an impossible lease, or a state file that is none;
    AuthError for a token file that others can read.
    """

    def __init__(
        self, listen: str = "127.0.0.1:0", *, token: bytes | None = None,
        lease_seconds: float = 10.0, state_path: str | Path | None = None,
        settle_seconds: float = SETTLE_SECONDS, max_connections: int | None = None,
        handshake_seconds: float = control.ACCEPT_SECONDS, tls_cert: str | None = None,
        tls_key: str | None = None,
    ):
        self._host, self._port = control.parse_address(listen)
        if not (math.isfinite(lease_seconds) and lease_seconds > 0):
            raise ConfigError(f"a lease of {lease_seconds} s; it must be more than 0")
        self._token = control.load_token() if token is None else token
        self._tls = tls.server_context(tls_cert, tls_key)
        self.lease_seconds = lease_seconds
        self.settle_seconds = settle_seconds
        self.handshake_seconds = handshake_seconds
        room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FDS
        self.max_connections = max_connections or max(1, min(MAX_CONNECTIONS, room))
        self.instance = secrets.token_hex(8)  # tells a client that it talks to another registry
        self.roster = Roster(Path(state_path) if state_path else None)
        self.address = ""
        self.peers: dict[_Peer, None] = {}
        self._broadcast_due = self._settle_due = False
        self._next_broadcast = 0.0  # not before this time of the loop
        self.started_at = time.monotonic()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._error: BaseException | None = None

    @property
    def epoch(self) -> int:
        """Version of the membership: grows with every change, also over restarts."""
        return self.roster.epoch

    @property
    def members(self) -> dict[str, Member]:
        """The servers that are there now, by id."""
        return self.roster.members

    # ---------------------------------------------------------------- lifecycle

    def start(self) -> Registry:
        """Listens; returns when `address` is known. Raises ConfigError if the port is taken."""
        self._thread = threading.Thread(target=self._run, name="expertwire-registry", daemon=True)
        self._thread.start()
        if not self._ready.wait(10):
            raise WaitTimeout("the registry did not start to listen within 10 s", "start")
        if self._error is not None:
            raise self._error
        return self

    def serve_forever(self) -> None:
        """Serves until `close` is called from a signal handler or another thread."""
        if self._thread is None:
            self.start()
        assert self._thread is not None
        self._thread.join()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stops listening and drops all connections. Idempotent."""
        if self.loop is not None and self._stopping is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                self.loop.call_soon_threadsafe(self._stopping.set)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5)

    def __enter__(self) -> Registry:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as err:
            self._error = err
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self.loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        self.started_at = time.monotonic()
        try:
            server = await asyncio.start_server(self._serve, self._host, self._port, backlog=512)
        except OSError as err:
            where = control.format_address(self._host, self._port)
            raise ConfigError(
                f"cannot listen on {where}: {err.strerror or err}; choose another --listen address "
                "or stop what is using it"
            ) from None
        host, port = server.sockets[0].getsockname()[:2]
        self.address = control.format_address(host, port)
        self._ready.set()
        keeper = asyncio.create_task(self._keep_leases())
        self.loop.call_later(self.settle_seconds, self._changed)  # "settling" has ended
        try:
            await self._stopping.wait()
        finally:
            keeper.cancel()
            server.close()
            for peer in list(self.peers):
                peer.writer.transport.abort()
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)  # aborted transports close their sockets in the next round

    # ---------------------------------------------------------------- connections

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = _Peer(writer)
        try:
            control.set_tcp_options(writer.get_extra_info("socket"))
            self._make_room(writer)
            self.peers[peer] = None
            async with asyncio.timeout(self.handshake_seconds):
                if self._tls is not None:
                    await tls.accept_tls(writer, self._tls, self.handshake_seconds)
                await self._authenticate(reader, writer)
            peer.authenticated = True
            while True:
                lasting = peer.watching is not None or peer.member or peer.plan
                async with asyncio.timeout(None if lasting else IDLE_SECONDS):
                    message = await control.receive_frame(reader, control.MAX_FRAME_BYTES)
                try:
                    reply = self._handle(message, peer)
                except ExpertwireError as err:
                    reply = {"type": "error", "reason": str(err)}
                if reply is not None:
                    await _send(writer, reply)
        except (asyncio.IncompleteReadError, OSError, TimeoutError):
            pass
        except ExpertwireError as err:
            log.info("connection dropped: %s", err)
        except asyncio.CancelledError:
            pass
        except Exception:
            log.exception("a connection failed")
        finally:
            self.peers.pop(peer, None)
            self._forget(peer, "its connection ended")
            self.settle_soon()  # it may have been the last client that was waited for
            writer.close()

    def _make_room(self, writer: asyncio.StreamWriter) -> None:
        """Raises ProtocolError if there are too many connections already."""
        waiting = [p for p in self.peers if not p.authenticated]
        full = len(self.peers) >= self.max_connections
        if not full and len(waiting) < MAX_HANDSHAKES:
            return
        slow = control.SLOW_HANDSHAKE_SECONDS
        if waiting and time.monotonic() - waiting[0].since > slow:
            self.peers.pop(waiting[0])
            waiting[0].writer.transport.abort()
            return
        reason = f"the registry has {len(self.peers)} connections, its limit"
        writer.write(control.encode_frame({"error": reason}))
        raise ProtocolError(reason)

    async def _authenticate(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        mine = control.hello()
        accept_nonce = bytes.fromhex(mine["nonce"])
        await _send(writer, mine)
        try:
            answer = await control.receive_frame(reader, control.HANDSHAKE_FRAME_BYTES)
            connect_nonce = control.check_hello(answer)
            control.check_proof(self._token, b"connect", accept_nonce, connect_nonce, answer)
        except (AuthError, ProtocolError) as err:
            await _send(writer, control.refusal(err))
            raise
        done = control.proof(self._token, b"accept", accept_nonce, connect_nonce)
        await _send(writer, {"proof": done})

    # ---------------------------------------------------------------- messages

    def _handle(self, message: dict, peer: _Peer) -> dict | None:
        """The reply to one message. Raises ExpertwireError: the peer is told, and stays."""
        now = time.monotonic()
        if peer.member is not None:
            peer.member.last_heard = now
        handler = self._handlers.get(str(message.get("type")))
        if handler is None:
            raise ProtocolError(f"unknown message type {printable(message.get('type'), 40)!r}")
        return handler(self, message, peer, now)

    def _register(self, message: dict, peer: _Peer, now: float) -> dict:
        if peer.member is not None:
            raise ProtocolError("this connection has registered already")
        peer.member = self.roster.register(message, now)
        self._end_plan(peer)
        self._changed()
        return {"type": "registered", "server_id": peer.member.server_id, "epoch": self.epoch,
                "seat": peer.member.seat, "lease_seconds": self.lease_seconds}

    def _heartbeat(self, message: dict, peer: _Peer, now: float) -> dict:
        member = peer.member
        if member is None or self.members.get(member.server_id) is not member:
            raise ProtocolError("not a member any more; register again")
        if "stats" in message:
            member.stats = with_rates(check_stats(message["stats"]), member.stats)
        return {"type": "alive", "epoch": self.epoch, "draining": member.draining}

    def _client_report(self, message: dict, peer: _Peer, now: float) -> dict:
        peer.stats = with_rates(check_stats(message.get("stats")), peer.stats)
        return {"type": "reported"}

    def _leave(self, message: dict, peer: _Peer, now: float) -> dict:
        self._forget(peer, "it left")
        return {"type": "left"}

    def _watch(self, message: dict, peer: _Peer, now: float) -> dict:
        peer.watching = client_name(self, peer, printable(message.get("client") or "client", 64))
        moves.seen(self, {"epoch": message.get("seen")}, peer, now)  # from before a break
        if self.roster.saw_epoch(message.get("epoch")):
            self._changed()
        return members_message(self)

    def _report(self, message: dict, peer: _Peer, now: float) -> None:
        self.roster.report(str(message.get("server_id")), str(message.get("what", "")))

    def _plan(self, message: dict, peer: _Peer, now: float) -> dict:
        self._end_plan(peer)
        peer.plan = self.roster.plan(message.get("model"), message.get("num_servers"), now)
        return {"type": "planned", "experts": peer.plan.experts}

    def _status(self, message: dict, peer: _Peer, now: float) -> dict:
        return status_message(self, now)

    _handlers: dict[str, Any] = {  # noqa: RUF012 (a table of methods, never changed)
        "register": _register, "heartbeat": _heartbeat, "leave": _leave, "watch": _watch,
        "report": _report, "plan": _plan, "status": _status, **moves.HANDLERS,
        "client_report": _client_report,
    }

    # ---------------------------------------------------------------- membership

    def _forget(self, peer: _Peer, why: str) -> None:
        member, peer.member = peer.member, None
        self._end_plan(peer)
        if member is not None and self.roster.remove(member, why):
            self._changed()

    def _end_plan(self, peer: _Peer) -> None:
        if peer.plan is not None:
            self.roster.end_plan(peer.plan, time.monotonic())
            peer.plan = None

    def _changed(self) -> None:
        if not self._broadcast_due and self.loop is not None:
            self._broadcast_due = True
            pause = max(BROADCAST_SECONDS, self._next_broadcast - self.loop.time())
            self.loop.call_later(pause, self._broadcast)

    @property
    def settling(self) -> bool:
        """Whether servers and clients of an earlier registry may still be on their way back."""
        return time.monotonic() - self.started_at < self.settle_seconds

    def settle_soon(self) -> None:
        """Looks, once for all that comes together, which servers' lists all clients have."""
        if not self._settle_due and self.loop is not None:
            self._settle_due = True
            self.loop.call_later(BROADCAST_SECONDS, self._settle)

    def _settle(self) -> None:
        self._settle_due = False
        moves.settle(self, time.monotonic())

    def _broadcast(self) -> None:
        self._broadcast_due = False
        assert self.loop is not None
        frame = control.encode_frame(members_message(self))
        watchers = [peer for peer in self.peers if peer.watching is not None]
        seconds = len(frame) * len(watchers) / BROADCAST_BYTES_PER_SECOND
        self._next_broadcast = self.loop.time() + seconds
        for peer in watchers:
            # A watcher that does not read must not hold the others: drop it, it will reconnect.
            if peer.writer.transport.get_write_buffer_size() > 4 * control.MAX_FRAME_BYTES:
                peer.writer.transport.abort()
            else:
                peer.writer.write(frame)

    async def _keep_leases(self) -> None:
        pause = self.lease_seconds / 8
        while True:
            slept_at = time.monotonic()
            await asyncio.sleep(pause)
            now = time.monotonic()
            self._settle()
            if now - slept_at > 3 * pause:
                # This process was stopped or starved: heartbeats may lie unread. Nobody is silent
                # because we did not listen.
                for member in self.members.values():
                    member.last_heard = min(now, member.last_heard + now - slept_at)
                continue
            for peer in list(self.peers):
                member = peer.member
                if member is not None and now - member.last_heard > self.lease_seconds:
                    self._forget(peer, f"silent for {now - member.last_heard:.1f} s")
                    peer.writer.transport.abort()


async def _send(writer: asyncio.StreamWriter, message: dict) -> None:
    writer.write(control.encode_frame(message))
    await asyncio.wait_for(writer.drain(), control.HANDSHAKE_SECONDS)
