"""The server's side of its connection to one client: what it asked for, its memory, its slots."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from ..client.link import DATA_PROTOCOL, check_signal_mode, parse_hex, parse_wire, wire_field
from ..config import MAX_IMM_SLOTS, SIGNAL_MODES, ServerConfig
from ..control.connection import Endpoint
from ..control.frames import Channel
from ..control.handles import ConnectionHandle, MemoryHandle
from ..device_structs import SIGNAL_WRITE_IMM, ServerSlot
from ..errors import ConfigError, ExpertwireError, HandleError, ProtocolError
from ..hca.interface import Hca
from ..message import ReplyMode, SlotShape
from ..pacing import Pace, shares


class ClientLink:
    """One connected client of a server."""

    def __init__(self, request: dict[str, Any], shape: SlotShape, channel: Channel):
        self.name = str(request.get("client", ""))[:64]
        self.client_id = int(request["client_id"])
        self.signal_mode = int(request["signal_mode"])
        self.do_ibgda = bool(request.get("do_ibgda", True))
        self.shape = shape
        self.channel = channel
        self.endpoint: Endpoint | None = None
        self.wanted_bytes = Pace.of(shape).window_bytes
        self.credit = 0  # what it was told last
        self.num_refused = 0
        self.closed = False

    def grant(self, credit: int) -> None:
        """Tells the client how many bytes it may have on their way, if that is news.

        Raises ProtocolError or WaitTimeout if it cannot be told: it is gone, or does not read.
        """
        if credit != self.credit:
            self.credit = credit
            self.channel.send({"type": "credit", "credit": credit}, timeout=0.05)

    def fill_slot(self, entry: ServerSlot, slot_idx: int) -> None:
        """Writes the device's view of one slot that nothing has come in yet."""
        end, shape = self.endpoint, self.shape
        assert end is not None and end.remote is not None
        entry.recv_addr = end.recv.addr + slot_idx * shape.request_slot_bytes
        entry.recv_slot_bytes = shape.request_slot_bytes
        offset = slot_idx * shape.reply_slot_bytes
        entry.in_place = not self.do_ibgda
        entry.reply_addr = (end.mapped_addr if entry.in_place else end.send.addr) + offset
        entry.reply_slot_bytes = shape.reply_slot_bytes
        entry.remote_reply_addr = end.remote.addr + offset
        entry.peer = end.peer_addr
        entry.client_id, entry.open = self.client_id, 1
        entry.max_rows, entry.max_pairs = shape.max_rows, shape.max_reply_rows
        entry.slot_idx, entry.signal_mode = slot_idx, self.signal_mode

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.channel.close()
            if self.endpoint is not None:
                self.endpoint.close()


def share_credit(clients: Sequence[ClientLink], config: ServerConfig) -> list[ClientLink]:
    """Tells the clients what they may have on their way; returns those that take no messages."""
    parts = shares(config.max_inflight_bytes, [link.wanted_bytes for link in clients])
    stuck = []
    for link, credit in zip(clients, parts, strict=True):
        try:
            link.grant(credit)
        except (ExpertwireError, OSError):
            stuck.append(link)
    return stuck


def admit(
    hca: Hca, channel: Channel, *, model: dict[str, Any], server_id: str, config: ServerConfig,
    timeout: float, others: Sequence[ClientLink],
) -> ClientLink:
    """Answers one client's connect request, after the channel's authentication.

    others: the clients that it will share the server's budget with.
    A request that does not fit is answered with the reason. Raises ExpertwireError after that.
    """
    endpoint = None
    fds: list[int] = []
    try:
        request, fds = channel.recv(timeout)
        shape = check_request(request, model, config)
        check_signal_mode(hca, request["signal_mode"], request.get("do_ibgda", True))
        link = ClientLink(request, shape, channel)
        endpoint = Endpoint(
            hca, send_bytes=shape.num_slots * shape.reply_slot_bytes,
            recv_bytes=shape.num_slots * shape.request_slot_bytes, num_qps=int(request["num_qps"]),
            depth=config.queue_depth, timeout_ns=int(config.reply_timeout * 1e9),
        )
        if link.signal_mode == SIGNAL_WRITE_IMM and link.do_ibgda:
            endpoint.watch_immediates(shape.request_slot_bytes, shape.num_slots)
        memory = MemoryHandle.unpack(parse_hex(request, "memory"))
        if memory.num_bytes < shape.num_slots * shape.reply_slot_bytes:
            raise HandleError("the client offers less reply memory than its slots need")
        taken, fds = fds, []
        endpoint.connect(
            ConnectionHandle.unpack(parse_hex(request, "connection")), memory, taken,
            parse_wire(request),
        )
        wants = [other.wanted_bytes for other in [*others, link]]
        link.credit = shares(config.max_inflight_bytes, wants)[-1]
        channel.send(
            {
                "type": "connected", "server_id": server_id, "credit": link.credit,
                "connection": endpoint.connection_handle().pack().hex(),
                "memory": endpoint.memory_handle().pack().hex(), **wire_field(endpoint),
            },
            endpoint.fds(),
        )
        link.endpoint = endpoint
        return link
    except (ExpertwireError, OSError) as err:
        refuse(channel, str(err))
        for fd in fds:
            os.close(fd)
        if endpoint is not None:
            endpoint.close()
        channel.close()
        if isinstance(err, OSError):
            raise ProtocolError(f"connection set-up failed: {err}") from err
        raise


def refuse(channel: Channel, reason: str) -> None:
    """Tells the peer why; it may be gone already."""
    with contextlib.suppress(ExpertwireError, OSError):
        channel.send({"type": "error", "reason": reason})


def check_request(request: dict, model: dict, config: ServerConfig) -> SlotShape:
    """The slot shape a client asks for, if this server can give it.

    Raises ProtocolError for another protocol, ConfigError for another model or for sizes beyond
    this server's limits.
    """
    if request.get("type") != "connect":
        raise ProtocolError(f"expected a connect request, got {request.get('type')!r}")
    if request.get("data_protocol") != DATA_PROTOCOL:
        raise ProtocolError(
            f"data protocol {request.get('data_protocol')!r}; this server speaks {DATA_PROTOCOL}"
        )
    if request.get("fingerprint") != model["fingerprint"]:
        raise ConfigError(f"this server serves {model['name']}, the client wants another model")
    fields = {field.name: int for field in dataclasses.fields(SlotShape)}
    given = request.get("shape")
    if not isinstance(given, dict) or set(given) != set(fields):
        raise ProtocolError("connect request without a complete slot shape")
    for name, value in given.items():
        if not isinstance(value, int) or value < 0 or value >= 1 << 31:
            raise ProtocolError(f"slot shape: {name} is {value!r}")
    shape = SlotShape(**{**given, "fp8": bool(given["fp8"])})
    if shape.hidden_size != model["hidden_size"]:
        raise ConfigError(f"hidden size {shape.hidden_size}; the model has {model['hidden_size']}")
    if shape.reply_mode not in list(ReplyMode):
        raise ProtocolError(f"unknown reply mode {shape.reply_mode}")
    if shape.experts_per_row > config.max_experts_per_row:
        raise ConfigError(
            f"{shape.experts_per_row} experts per row; the limit is {config.max_experts_per_row}"
        )
    largest = shape.num_slots * max(shape.request_slot_bytes, shape.reply_slot_bytes)
    if largest > config.max_slot_bytes:
        raise ConfigError(
            f"{largest} bytes of slots; the limit is {config.max_slot_bytes}: lower max_rows or "
            "num_slots at the client, or raise max_slot_bytes at the server"
        )
    if request.get("signal_mode") not in SIGNAL_MODES.values():
        raise ProtocolError(f"unknown signal mode {request.get('signal_mode')!r}")
    if request["signal_mode"] == SIGNAL_WRITE_IMM and shape.num_slots > MAX_IMM_SLOTS:
        raise ConfigError(f"{shape.num_slots} slots; with immediates at most {MAX_IMM_SLOTS}")
    num_qps, client_id = request.get("num_qps"), request.get("client_id")
    if not isinstance(num_qps, int) or not 1 <= num_qps <= 64:
        raise ProtocolError(f"{num_qps!r} queue pairs; from 1 to 64 are possible")
    if not isinstance(client_id, int) or not 0 < client_id < 1 << 32:
        raise ProtocolError(f"client id {client_id!r} does not fit 32 bits")
    return shape
