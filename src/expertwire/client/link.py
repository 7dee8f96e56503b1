"""The client's side of its connection to one server: handshake, memory, counters."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from typing import Any

from ..config import SIGNAL_MODES, ClientConfig
from ..control.connection import Endpoint
from ..control.data_address import connect_data
from ..control.frames import Channel
from ..control.handles import ConnectionHandle, MemoryHandle, WireHandle
from ..device_structs import SIGNAL_WRITE, SIGNAL_WRITE_IMM
from ..errors import ConfigError, ExpertwireError, HandleError, ProtocolError, WaitTimeout
from ..hca.interface import Hca
from ..message import SlotShape
from ..pacing import UNLIMITED
from .patience import Patience, longest_wait

DATA_PROTOCOL = 1
FIRST_SECONDS, LONGEST_SECONDS = 2.0, 10.0  # for a handshake, doubled after each failure in a row


class ServerLink:
    """One connected server (a membership.ServerInfo). `lost` is set by whoever notices."""

    def __init__(
        self, server: Any, endpoint: Endpoint, channel: Channel, shape: SlotShape,
        patience: Patience,
    ):
        self.server_id: str = server.server_id
        self.seat: int = server.seat
        self.address: str = server.address
        self.experts = list(server.experts)
        self.draining: bool = server.draining  # used only for what nobody else holds
        self.endpoint = endpoint
        self.channel = channel
        self.shape = shape
        self.lost = False
        self.credit = UNLIMITED  # bytes that may be on their way to this server
        self.previous_seq = [0] * shape.num_slots  # what each request slot's flag holds
        self.patience = patience
        self.counters = patience.counters

    def hear(self) -> None:
        """Takes what the server says: a new credit. Raises ProtocolError once it is gone."""
        with contextlib.suppress(WaitTimeout):
            while True:
                message, fds = self.channel.recv(0.0)
                for fd in fds:
                    os.close(fd)
                self.grant(message.get("credit"))

    def grant(self, credit: object) -> None:
        if isinstance(credit, int) and not isinstance(credit, bool) and credit >= 0:
            self.credit = credit

    def close(self) -> None:
        self.channel.close()
        self.endpoint.close()


def open_link(
    hca: Hca, server: Any, *, token: bytes, client_id: int, client_name: str, shape: SlotShape,
    fingerprint: str, config: ClientConfig, patience: Patience,
    stopped: threading.Event | None = None, registry: str = "",
) -> ServerLink:
    """Connects to one server (a membership.ServerInfo). `stopped` ends it early: WaitTimeout.

    registry: its address (data_address.connect_data).

    Raises WaitTimeout within twice LONGEST_SECONDS, AuthError, ProtocolError, or ConfigError if the
    server refuses (another model, sizes beyond its limits).
    """
    check_signal_mode(hca, SIGNAL_MODES[config.signal_mode], config.do_ibgda)
    # One stalled server must not be waited for at length: others may hold the same experts. One
    # that is only slow, as all are on a machine with more work than cores, gets more time each try.
    first = min(config.connect_timeout / 2, FIRST_SECONDS)
    timeout = max(first, min(first * 2 ** min(patience.failures, 16), LONGEST_SECONDS))
    channel = connect_data(hca, server.address, token, timeout, stopped, registry)
    channel.stopped = stopped
    endpoint = None
    fds: list[int] = []
    try:
        endpoint = Endpoint(
            hca, send_bytes=shape.num_slots * shape.request_slot_bytes,
            recv_bytes=shape.num_slots * shape.reply_slot_bytes, num_qps=config.num_qps,
            depth=config.queue_depth, timeout_ns=int(longest_wait(config.reply_timeout) * 1e9),
        )
        if SIGNAL_MODES[config.signal_mode] == SIGNAL_WRITE_IMM and config.do_ibgda:
            endpoint.watch_immediates(shape.reply_slot_bytes, shape.num_slots)
        request = {
            "type": "connect", "data_protocol": DATA_PROTOCOL, "client_id": client_id,
            "client": client_name, "fingerprint": fingerprint,
            "shape": dataclasses.asdict(shape), "num_qps": config.num_qps,
            "signal_mode": SIGNAL_MODES[config.signal_mode], "do_ibgda": config.do_ibgda,
            "connection": endpoint.connection_handle().pack().hex(),
            "memory": endpoint.memory_handle().pack().hex(), **wire_field(endpoint),
        }
        channel.send(request, endpoint.fds())
        reply, fds = channel.recv(timeout)
        if reply.get("type") == "error":
            raise ConfigError(f"server {server.server_id} refused the connection: "
                              f"{reply.get('reason', 'no reason given')}")
        if reply.get("type") != "connected":
            raise ProtocolError(f"server {server.server_id} answered {reply.get('type')!r}")
        memory = MemoryHandle.unpack(parse_hex(reply, "memory"))
        if memory.num_bytes < shape.num_slots * shape.request_slot_bytes:
            raise HandleError(f"server {server.server_id} offers less memory than was agreed")
        connection, taken, fds = ConnectionHandle.unpack(parse_hex(reply, "connection")), fds, []
        endpoint.connect(connection, memory, taken, parse_wire(reply))
    except (ExpertwireError, OSError, KeyError, TypeError, ValueError):
        channel.close()
        for fd in fds:
            os.close(fd)
        if endpoint is not None:
            endpoint.close()
        raise
    channel.stopped = None
    link = ServerLink(server, endpoint, channel, shape, patience)
    link.grant(reply.get("credit"))
    return link


def check_signal_mode(hca: Hca, signal_mode: int, do_ibgda: bool) -> None:
    """Raises ConfigError if a flag could be seen before the writes that it announces, or if there
    is no memory of the peer to store into."""
    if hca.network and not do_ibgda:
        raise ConfigError("stores into the peer's memory need one host: leave do_ibgda on")
    if do_ibgda and signal_mode == SIGNAL_WRITE and hca.relaxed_ordering:
        raise ConfigError(
            'signal_mode "write" needs a path that keeps writes in order, and this one may not: '
            'use "add" or "write_imm"'
        )


def wire_field(endpoint: Endpoint) -> dict[str, str]:
    """The wire handle as a field of a handshake message, if there is one."""
    wire = endpoint.wire_handle()
    return {} if wire is None else {"wire": wire.pack().hex()}


def parse_wire(message: dict) -> WireHandle | None:
    """The peer's wire handle; None if it sent none. Raises HandleError."""
    return WireHandle.unpack(parse_hex(message, "wire")) if "wire" in message else None


def parse_hex(message: dict, name: str) -> bytes:
    """A handle's bytes out of a handshake message. Raises HandleError if they are not hex."""
    try:
        return bytes.fromhex(message[name])
    except (KeyError, TypeError, ValueError) as err:
        raise HandleError(f"handshake without a usable {name} handle") from err
