"""The receiving half of a client: wait for replies, route around servers that fail, combine."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING, Any

from .device_structs import (
    STAGE_NAMES,
    STATUS_BAD_ARGUMENT,
    STATUS_COMPLETION_ERROR,
    STATUS_NAMES,
    STATUS_TIMEOUT,
    STATUS_TOO_MANY_SERVERS,
    KernelStatus,
)
from .errors import (
    ConfigError,
    ExpertwireError,
    HcaError,
    ProtocolError,
    RejectedError,
    ServerLostError,
    WaitTimeout,
)
from .hca.wqe import syndrome_name
from .launch import last_error
from .message import DATA_TYPE_BYTES, DATA_TYPES, REASON_TEXT, Reason

if TYPE_CHECKING:
    from .client import Client
    from .flight import Chunk, Flight

SLICE_NS = 100_000_000  # longest native wait
MAX_TRIES = 8  # a chunk is sent at most this often before its last error is raised


def receive(client: Client, flight: Flight, chunk: Chunk) -> None:
    """Waits for one chunk and combines it, sending it again while other servers can serve it.

    Raises the error of the last try: ServerLostError, WaitTimeout, RejectedError, NoServerError.
    """
    for attempt in range(MAX_TRIES):
        try:
            raise_for_status(flight)
            wait_replies(client, flight)
            combine(client, flight, chunk)
            return
        except (ServerLostError, WaitTimeout, HcaError) as err:
            if attempt + 1 == MAX_TRIES:
                raise
            assert flight.table is not None
            failed = [flight.table.links[s] for s in failed_servers(flight)]
            for link in failed:
                client.links.mark_lost(link, str(err))
            table = client.links.table.without([*failed, *lost_links(client)])
            client.num_retries += 1
            client.issue(flight, chunk, table)


def lost_links(client: Client) -> list:
    return [link for link in client.links.table.links if link.lost]


def failed_servers(flight: Flight) -> list[int]:
    """Servers that this try cannot count on any more."""
    assert flight.table is not None
    if flight.status.code:
        return [flight.status.peer]
    silent = [s for s in flight.waiting if not flight.arrivals[s]]
    return [s for s in silent if flight.table.links[s].lost] or silent


def wait_replies(client: Client, flight: Flight) -> None:
    """Until every loaded server's flag holds the seq. Spins, then sleeps; drives the engine."""
    table = flight.table
    assert table is not None
    start = time.perf_counter_ns()
    timeout_ns = int(client.config.reply_timeout * 1e9)
    flight.arrivals[:] = 0
    while True:
        left = max(0, start + timeout_ns - time.perf_counter_ns())
        # In slices, so that a signal (Ctrl-C) gets its turn soon.
        code = flight.wait(client.hca.pointer, client.spin_ns, min(left, SLICE_NS))
        if code == 0:
            break
        if code not in (-errno.EINTR, -errno.ETIMEDOUT):
            raise HcaError(f"waiting for replies failed: {last_error()}")
        if client.closed:
            raise ConfigError("the client was closed while a batch was waiting")
        raise_if_lost(flight)  # also after a slice: an earlier wait may have had the interrupt
        if code == -errno.ETIMEDOUT and left <= SLICE_NS:
            raise_timeout(client, flight)
    arrivals = flight.arrivals.tolist()
    for s in flight.waiting:
        count_reply(client, flight, s, arrivals[s])
    flight.waiting = []
    client.times.add("wait", time.perf_counter_ns() - start)


def raise_if_lost(flight: Flight) -> None:
    """ServerLostError if a server that has not replied yet went away."""
    assert flight.table is not None
    for s in flight.waiting:
        link = flight.table.links[s]
        if link.lost and not flight.arrivals[s]:
            raise ServerLostError(
                f"server {link.server_id} went away during layer {flight.shape.layer}",
                link.server_id, flight.shape.layer,
            )


def raise_timeout(client: Client, flight: Flight) -> None:
    assert flight.table is not None
    raise_if_lost(flight)
    s = next(s for s in flight.waiting if not flight.arrivals[s])
    link, seq, seen = flight.table.links[s], flight.shape.seq, flight.flags[s].value
    raise WaitTimeout(
        f"no reply from server {link.server_id} within {client.config.reply_timeout} s "
        f"(stage combine, expected seq {seq}, seen {seen}); it may be overloaded: raise "
        "reply_timeout, or add servers", "combine", link.server_id, seq, seen,
    )


def count_reply(client: Client, flight: Flight, s: int, now: int) -> None:
    assert flight.table is not None
    entry = flight.servers[s]
    rows = int(flight.batch_size[s])
    row_bytes = flight.shape.hidden_size * DATA_TYPE_BYTES[flight.shape.data_type]
    reply_bytes = flight.shape.hidden_size * DATA_TYPE_BYTES[flight.shape.reply_type]
    flight.table.links[s].counters.add(
        rows=rows, bytes_sent=rows * (row_bytes + 8 * flight.shape.experts_per_row) + 144,
        bytes_received=flight.reply_rows(s) * reply_bytes + 72, duration_ns=now - flight.issued_ns,
    )
    if client.trace is not None:
        head = flight.reply_head(s)
        client.trace.append({
            "kind": "reply", "layer": flight.shape.layer, "server": entry.server_id,
            "server_id": flight.table.links[s].server_id, "sent_ns": flight.issued_ns,
            "seen_ns": now, "queue_us": head.queue_us, "experts_us": head.experts_us,
        })


def combine(client: Client, flight: Flight, chunk: Chunk) -> None:
    """Adds the partial results into the chunk's rows of the output."""
    output = chunk.handle.batch.output[chunk.begin : chunk.end]
    start = time.perf_counter_ns()
    args = flight.combine
    args.output = output.data_ptr()
    args.output_stride = output.stride(0) * output.element_size()
    args.output_type, args.num_tokens = DATA_TYPES[output.dtype], output.shape[0]
    args.timeout_ns = int(client.config.reply_timeout * 1e9)
    flight.launch_combine.run(client.engines)
    end = time.perf_counter_ns()
    client.times.add("combine", end - start)
    if client.trace is not None:
        client.trace.append({"kind": "combine", "layer": flight.shape.layer, "start_ns": start,
                             "end_ns": end})
    raise_for_status(flight)


def sent(client: Client, flight: Flight, start: int, filled: int) -> None:
    """Notes how long the stages of sending took.

    start, filled: perf_counter times in ns, before and after the arguments were filled in.
    """
    launch = flight.launch_send
    route, pack, put = (launch.elapsed_ns(i) for i in range(3))
    client.times.add("route", route)
    client.times.add("pack", pack)
    client.times.add("put", put)
    client.times.add("send", time.perf_counter_ns() - start)
    if client.trace is not None:
        routed = filled + route  # the put's end includes what the HCA sent at once
        client.trace.append({
            "kind": "send", "layer": flight.shape.layer, "start_ns": start,
            "routed_ns": routed, "packed_ns": routed + pack, "put_ns": flight.issued_ns,
        })


def raise_for_status(flight: Flight) -> None:
    """The exception for what a kernel reported, if it reported something."""
    status = flight.status
    if status.code == 0:
        return
    assert flight.table is not None
    link = flight.table.links[status.peer] if status.peer < len(flight.table.links) else None
    error = status_error(status, link.server_id if link else "", flight.shape.layer)
    if link is not None and link.lost and not isinstance(error, RejectedError):
        error = ServerLostError(
            f"server {link.server_id} went away during layer {flight.shape.layer}",
            link.server_id, flight.shape.layer,
        )
    raise error


def status_error(status: KernelStatus, peer: str, layer: int) -> ExpertwireError:
    """A KernelStatus in words."""
    stage = STAGE_NAMES.get(status.stage, str(status.stage))
    where = f"layer {layer}, stage {stage}, server {peer}"
    if status.code == STATUS_COMPLETION_ERROR:
        return HcaError(
            f"{where}: error completion, syndrome {status.syndrome:#04x} "
            f"({syndrome_name(status.syndrome)}) on work-queue entry {status.wqe_idx}",
            status.syndrome, status.wqe_idx, peer,
        )
    if status.code == STATUS_TIMEOUT:
        return WaitTimeout(
            f"{where}: timed out, expected {status.expected}, seen {status.seen}", stage, peer,
            status.expected, status.seen,
        )
    if status.code == STATUS_BAD_ARGUMENT and status.syndrome:
        reason = Reason(status.syndrome)
        return RejectedError(
            f"{where}: the server refused the message: {REASON_TEXT[reason]}", reason, peer
        )
    if status.code == STATUS_BAD_ARGUMENT:
        return ProtocolError(
            f"{where}: the reply's head is damaged or does not fit the request "
            f"(expected {status.expected}, seen {status.seen})"
        )
    if status.code == STATUS_TOO_MANY_SERVERS:
        return ConfigError(
            f"{where}: the batch goes to {status.seen} servers, max_servers is {status.expected}"
        )
    name = STATUS_NAMES.get(status.code, str(status.code))
    return HcaError(f"{where}: {name} (expected {status.expected:#x}, seen {status.seen:#x})",
                    peer=peer)


def client_stats(client: Client) -> dict[str, Any]:
    table = client.links.table
    return {
        "epoch": table.epoch,
        "stages": client.times.summary(),
        "servers": {link.server_id: {"seat": link.seat, "experts": len(link.experts),
                                     **link.counters.summary()} for link in table.links},
        "skipped_ids": client.num_skipped_ids,
        "retries": client.num_retries,
    }
