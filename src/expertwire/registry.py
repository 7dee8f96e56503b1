"""The registry: which servers are there, what they hold, and since when.

Membership only; no data passes through it. A server's connection is its lease: end-of-file ends
membership at once, silence ends it after `lease_seconds`, and a server that is slow but sends
heartbeats stays. Epochs only grow, also across a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

from . import control
from .errors import AuthError, ConfigError, ExpertwireError, ProtocolError
from .placement import plan_experts

log = logging.getLogger("expertwire.registry")

MAX_CONNECTIONS = 4096


class Member:
    """One server as the registry knows it."""

    def __init__(self, server_id: str, seat: int, epoch: int, facts: dict[str, Any]):
        self.server_id = server_id
        self.seat = seat
        self.epoch_joined = epoch
        self.facts = facts  # name, address, pid, model, experts
        self.draining = False
        self.stats: dict[str, Any] = {}
        self.last_heard = time.monotonic()
        self.reports = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "server_id": self.server_id, "seat": self.seat, "epoch_joined": self.epoch_joined,
            "draining": self.draining, **self.facts,
        }


class Registry:
    """An asyncio server in a thread of its own (`start`) or in the foreground (`serve_forever`).

    listen: "HOST:PORT"; port 0 picks a free one, `address` tells which.
    state_path: where the epoch is kept so that it grows across restarts; without it a restarted
        registry starts its epoch from the wall clock in milliseconds, which grows too.
    """

    def __init__(
        self, listen: str = "127.0.0.1:0", *, token: bytes | None = None,
        lease_seconds: float = 10.0, state_path: str | Path | None = None,
    ):
        self._host, self._port = control.parse_address(listen)
        self._token = control.load_token() if token is None else token
        self.lease_seconds = lease_seconds
        self._state_path = Path(state_path) if state_path else None
        self.address = ""
        self.epoch = self._first_epoch()
        self.members: dict[str, Member] = {}
        self._seats: list[int] = []  # freed seats, oldest first
        self._next_seat = 0
        self._watchers: dict[asyncio.StreamWriter, str] = {}
        self._planned: list[set[int]] = []
        self.reports = 0
        self._started_at = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._error: BaseException | None = None

    # ---------------------------------------------------------------- lifecycle

    def start(self) -> Registry:
        """Listens; returns when `address` is known. Raises ConfigError if the port is taken."""
        self._thread = threading.Thread(target=self._run, name="expertwire-registry", daemon=True)
        self._thread.start()
        self._ready.wait(10)
        if self._error is not None:
            raise self._error
        return self

    def serve_forever(self) -> None:
        """Serves until `close` is called from a signal handler or another thread."""
        assert self._thread is not None, "call start() first"
        self._thread.join()

    def close(self) -> None:
        """Stops listening and drops all connections. Idempotent."""
        if self._loop is not None and self._stopping is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                self._loop.call_soon_threadsafe(self._stopping.set)
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
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
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
        expiry = asyncio.create_task(self._expire())
        try:
            await self._stopping.wait()
        finally:
            expiry.cancel()
            server.close()
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # ---------------------------------------------------------------- connections

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        member: Member | None = None
        try:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(control.HANDSHAKE_SECONDS):
                await self._authenticate(reader, writer)
            while True:
                message = await _receive(reader)
                reply, member = self._handle(message, member, writer)
                if reply is not None:
                    await _send(writer, reply)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            pass
        except ExpertwireError as err:
            log.info("connection dropped: %s", err)
        except asyncio.CancelledError:
            pass
        except Exception:
            log.exception("a connection failed")
        finally:
            self._watchers.pop(writer, None)
            if member is not None and self.members.get(member.server_id) is member:
                self._remove(member, "its connection ended")
            writer.close()

    async def _authenticate(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        mine = control.hello()
        accept_nonce = bytes.fromhex(mine["nonce"])
        await _send(writer, mine)
        answer = await _receive(reader)
        try:
            connect_nonce = control.check_hello(answer)
            control.check_proof(self._token, b"connect", accept_nonce, connect_nonce, answer)
        except ExpertwireError as err:
            reason = "wrong token" if isinstance(err, AuthError) else str(err)
            await _send(writer, {"error": reason})
            raise
        done = control.proof(self._token, b"accept", accept_nonce, connect_nonce)
        await _send(writer, {"proof": done})

    def _handle(
        self, message: dict, member: Member | None, writer: asyncio.StreamWriter
    ) -> tuple[dict | None, Member | None]:
        """One message -> (reply, the connection's member)."""
        kind = message.get("type")
        if member is not None:
            member.last_heard = time.monotonic()
        if kind == "register":
            try:
                member = self._register(message)
            except ExpertwireError as err:
                return {"type": "error", "reason": str(err)}, member
            return {"type": "registered", "server_id": member.server_id, "seat": member.seat,
                    "epoch": self.epoch, "lease_seconds": self.lease_seconds}, member
        if kind == "heartbeat":
            if member is None or self.members.get(member.server_id) is not member:
                return {"type": "error", "reason": "not a member any more"}, None
            member.stats = message.get("stats") or {}
            return {"type": "alive", "epoch": self.epoch}, member
        if kind == "leave":
            if member is not None and self.members.get(member.server_id) is member:
                self._remove(member, "it left")
            return {"type": "left"}, None
        if kind == "watch":
            self._watchers[writer] = str(message.get("client", ""))[:64]
            return self._members_message(), member
        if kind == "report":
            self.reports += 1
            reported = self.members.get(str(message.get("server_id")))
            if reported is not None:
                reported.reports += 1
            return None, member
        if kind == "drain":
            target = self._find(str(message.get("server")))
            if target is None:
                return {"type": "error", "reason": f"no server {message.get('server')!r}"}, member
            target.draining = True
            self._changed()
            return {"type": "draining", "server_id": target.server_id}, member
        if kind == "plan":
            held = [set(m.facts["experts"]) for m in self.members.values()] + self._planned
            ids = plan_experts(
                int(message["num_experts"]), held, message.get("num_servers"),
            )
            self._planned.append(set(ids))
            return {"type": "planned", "experts": ids}, member
        if kind == "status":
            return self._status(), member
        raise ProtocolError(f"unknown message type {kind!r}")

    # ---------------------------------------------------------------- membership

    def _register(self, message: dict) -> Member:
        facts = {key: message.get(key) for key in ("name", "address", "pid", "model", "experts")}
        model, experts = facts["model"], facts["experts"]
        if not isinstance(model, dict) or not isinstance(model.get("fingerprint"), str):
            raise ProtocolError("register without a model")
        if not isinstance(experts, list) or not all(isinstance(e, int) for e in experts):
            raise ProtocolError("register without a list of experts")
        for other in self.members.values():
            if other.facts["model"]["fingerprint"] != model["fingerprint"]:
                raise ConfigError(
                    f"this registry serves {other.facts['model'].get('name')}, not "
                    f"{model.get('name')}: start another registry for another model"
                )
        if len(self.members) >= MAX_CONNECTIONS:
            raise ConfigError(f"the registry has {len(self.members)} servers, its limit")
        experts = sorted(set(experts))
        facts["experts"] = experts
        if set(experts) in self._planned:
            self._planned.remove(set(experts))
        name = str(facts["name"] or "server")[:64]
        server_id = name
        while server_id in self.members:
            server_id = f"{name}-{secrets.token_hex(2)}"
        # Freed seats come back oldest first and only when many are free: late writes of an old
        # holder find somebody else's keys as late as possible.
        seat = self._seats.pop(0) if len(self._seats) > 64 else self._next_seat
        if seat == self._next_seat:
            self._next_seat += 1
        member = Member(server_id, seat, self.epoch + 1, facts)
        self.members[server_id] = member
        log.info("server %s joined with %d experts", server_id, len(experts))
        self._changed()
        return member

    def _remove(self, member: Member, why: str) -> None:
        del self.members[member.server_id]
        self._seats.append(member.seat)
        log.info("server %s removed: %s", member.server_id, why)
        self._changed()

    def _find(self, name: str) -> Member | None:
        if name in self.members:
            return self.members[name]
        found = [m for m in self.members.values() if str(m.seat) == name]
        return found[0] if found else None

    def _changed(self) -> None:
        self.epoch += 1
        self._save_epoch()
        frame = control.encode_frame(self._members_message())
        for writer in list(self._watchers):
            # A watcher that does not read must not hold the others: drop it, it will reconnect.
            if writer.transport.get_write_buffer_size() > 4 * control.MAX_FRAME_BYTES:
                writer.transport.abort()
            else:
                writer.write(frame)

    def _members_message(self) -> dict:
        return {"type": "members", "epoch": self.epoch,
                "servers": [m.as_dict() for m in self.members.values()]}

    def _status(self) -> dict:
        now = time.monotonic()
        return {
            "type": "status", "epoch": self.epoch, "uptime_s": round(now - self._started_at, 3),
            "clients": sorted(self._watchers.values()), "reports": self.reports,
            "servers": [
                {**m.as_dict(), "stats": m.stats, "reports": m.reports,
                 "silent_s": round(now - m.last_heard, 3)} for m in self.members.values()
            ],
        }

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(self.lease_seconds / 8)
            now = time.monotonic()
            for member in list(self.members.values()):
                if now - member.last_heard > self.lease_seconds:
                    self._remove(member, f"silent for {now - member.last_heard:.1f} s")

    # ---------------------------------------------------------------- epoch

    def _first_epoch(self) -> int:
        epoch = time.time_ns() // 1_000_000
        if self._state_path is not None and self._state_path.exists():
            try:
                epoch = max(epoch, int(json.loads(self._state_path.read_text())["epoch"]) + 1)
            except (OSError, ValueError, KeyError, TypeError) as err:
                raise ConfigError(f"{self._state_path} is not a registry state: {err}") from None
        return epoch

    def _save_epoch(self) -> None:
        if self._state_path is None:
            return
        fresh = self._state_path.with_name(self._state_path.name + ".new")
        fresh.write_text(json.dumps({"epoch": self.epoch}))
        os.replace(fresh, self._state_path)


async def _receive(reader: asyncio.StreamReader) -> dict:
    length = control.frame_length(await reader.readexactly(4))
    return control.decode_body(await reader.readexactly(length))


async def _send(writer: asyncio.StreamWriter, message: dict) -> None:
    writer.write(control.encode_frame(message))
    await asyncio.wait_for(writer.drain(), control.HANDSHAKE_SECONDS)
