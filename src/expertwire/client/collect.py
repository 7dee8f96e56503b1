"""The receiving half of a client: wait for replies, route around servers that fail, combine."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING

from ..device_structs import (
    STAGE_NAMES,
    STATUS_BAD_ARGUMENT,
    STATUS_COMPLETION_ERROR,
    STATUS_NAMES,
    STATUS_TIMEOUT,
    STATUS_TOO_MANY_SERVERS,
    KernelStatus,
)
from ..errors import (
    ConfigError,
    ExpertwireError,
    HcaError,
    ProtocolError,
    RejectedError,
    ServerLostError,
    WaitTimeout,
)
from ..hca.wqe import syndrome_name
from ..launch import last_error
from ..message import DATA_TYPES, REASON_TEXT, Reason
from .counting import count_reply
from .patience import FLOOR, longest_wait
from .send import issue

if TYPE_CHECKING:
    from .client import Client
    from .flight import Chunk, Flight
    from .link import ServerLink

SLICE_NS = 100_000_000  # longest native wait
ASLEEP_NS = 100_000_000  # a wait that took so much longer than asked: this process was stopped
MAX_TRIES = 8  # a chunk is sent at most this often before its last error is raised


def receive(client: Client, flight: Flight, chunk: Chunk) -> None:
    """Waits for one chunk and combines it, sending it again while other servers can serve it.

    NOT_HELD: the routing table was older than what the server holds, which can only be if the
    registry was away from here; as for a lost server, others are asked.

    Raises the error of the last try: ServerLostError, WaitTimeout, RejectedError, NoServerError.
    """
    for attempt in range(MAX_TRIES):
        flight.failed = []
        try:
            raise_for_status(flight)
            wait_replies(client, flight)
            combine(client, flight, chunk)
            client.dropped.update(chunk.dropped)
            return
        except (ServerLostError, WaitTimeout, HcaError, RejectedError) as err:
            if isinstance(err, RejectedError) and err.reason != Reason.NOT_HELD:
                raise  # another server would refuse it, too
            assert flight.table is not None
            if isinstance(err, HcaError):
                client.errors[f"{err.syndrome:#04x}"] += 1
            for s in flight.failed:
                client.links.mark_lost(flight.table.links[s], str(err))
            if attempt + 1 == MAX_TRIES:
                raise
            client.num_retries += 1
            issue(client, flight, chunk, client.links.usable())


def wait_replies(client: Client, flight: Flight) -> None:
    """Until every loaded server's flag holds the seq. Spins, then sleeps; drives the engine.

    Raises ServerLostError, HcaError or WaitTimeout, with `flight.failed` naming the servers.
    """
    start = now = time.perf_counter_ns()
    # The native call that may have handed over waited for one slice at most. Time before that does
    # not count: this process may have been busy elsewhere, and replies be here already.
    since = max(flight.issued_ns, start - SLICE_NS)
    flight.arrivals[:] = 0
    shortest_ns = int((client.config.reply_timeout or FLOOR) * 1e9)  # of all deadlines
    slice_ns = 0  # first a look: replies may be here, and servers lost, already
    while True:
        # In slices, so that a signal (Ctrl-C) gets its turn soon.
        code = flight.wait(client.hca.pointer, client.spin_ns, slice_ns)
        if code == 0:
            break
        if code not in (-errno.EINTR, -errno.ETIMEDOUT):
            raise HcaError(f"waiting for replies failed: {last_error()}")
        if client.closed:
            raise ConfigError("the client was closed while a batch was waiting")
        raise_if_lost(flight)
        before, now = now, time.perf_counter_ns()
        if now - before > slice_ns + ASLEEP_NS:
            since += now - before  # we were not running: nobody is silent because we did not look
        left_ns = shortest_ns - (now - since)
        if left_ns <= 0:
            left_ns = raise_if_silent(flight, now - since)
        slice_ns = min(SLICE_NS, left_ns)
    arrivals = flight.arrivals.tolist()
    for s in flight.waiting:
        count_reply(client, flight, s, arrivals[s])
    flight.waiting = []
    client.times.add("wait", time.perf_counter_ns() - start)


def silent(flight: Flight) -> list[tuple[int, ServerLink]]:
    """Servers whose reply is not in yet."""
    assert flight.table is not None
    return [(s, flight.table.links[s]) for s in flight.waiting if not flight.arrivals[s]]


def raise_if_lost(flight: Flight) -> None:
    """ServerLostError or HcaError if a server that has not replied yet cannot any more."""
    layer = flight.shape.layer
    for s, link in silent(flight):
        if link.lost:
            flight.failed.append(s)
            raise ServerLostError(f"server {link.server_id} went away during layer {layer}",
                                  link.server_id, layer)
        syndrome, wqe_idx = link.endpoint.first_error()
        if syndrome:
            flight.failed.append(s)
            raise completion_error(f"layer {layer}, server {link.server_id}", syndrome, wqe_idx,
                                   link.server_id)


def raise_if_silent(flight: Flight, waited_ns: int) -> int:
    """WaitTimeout if a server's deadline has passed; else ns until the next one does."""
    assert flight.table is not None
    left_ns, passed = [], []
    for s, link in silent(flight):
        seconds = link.patience.seconds(s in flight.table.alone)
        left_ns.append(int(seconds * 1e9) - waited_ns)
        if left_ns[-1] <= 0:
            flight.failed.append(s)
            passed.append(seconds)
    if flight.failed:
        s = flight.failed[0]
        link, seq, seen = flight.table.links[s], flight.shape.seq, flight.flags[s].value
        raise WaitTimeout(
            f"no reply from server {link.server_id} within {passed[0]:.3g} s "
            f"(stage combine, expected seq {seq}, seen {seen}); it may be overloaded: raise "
            "reply_timeout, or add servers", "combine", link.server_id, seq, seen,
        )
    return min(left_ns, default=1)


def combine(client: Client, flight: Flight, chunk: Chunk) -> None:
    """Adds the partial results into the chunk's rows of the output."""
    output = chunk.handle.batch.output[chunk.begin : chunk.end]
    start = time.perf_counter_ns()
    args = flight.combine
    args.output = output.data_ptr()
    args.output_stride = output.stride(0) * output.element_size()
    args.output_type, args.num_tokens = DATA_TYPES[output.dtype], output.shape[0]
    args.timeout_ns = int(longest_wait(client.config.reply_timeout) * 1e9)
    flight.launch_combine.run(client.engines)
    end = time.perf_counter_ns()
    client.times.add("combine", end - start)
    if client.trace is not None:
        client.trace.append({"kind": "combine", "layer": flight.shape.layer, "start_ns": start,
                             "end_ns": end})
    raise_for_status(flight)


def raise_for_status(flight: Flight) -> None:
    """The exception for what a kernel reported, if it reported something."""
    status = flight.status
    if status.code == 0:
        return
    assert flight.table is not None
    link = flight.table.links[status.peer] if status.peer < len(flight.table.links) else None
    flight.failed = [status.peer] if link else []
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
        return completion_error(where, status.syndrome, status.wqe_idx, peer)
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


def completion_error(where: str, syndrome: int, wqe_idx: int, peer: str) -> HcaError:
    return HcaError(
        f"{where}: error completion, syndrome {syndrome:#04x} ({syndrome_name(syndrome)}) on "
        f"work-queue entry {wqe_idx}", syndrome, wqe_idx, peer,
    )
