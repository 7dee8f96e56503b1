"""What a client counts: how long its stages took, what it sent and received, per server."""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any

from ..device_structs import ReplyHead
from ..message import DATA_TYPE_BYTES, RequestLayout
from ..trace import recorder as trace

if TYPE_CHECKING:
    from .client import Client
    from .flight import Flight


def sent(client: Client, flight: Flight, start: int, filled: int) -> None:
    """Notes how long the stages of sending took.

    start, filled: perf_counter times in ns, before and after the arguments were filled in.
    """
    launch = flight.launch_send
    route, pack, put = (launch.elapsed_ns(i) for i in range(3))
    client.times.add("route", route)
    client.times.add("pack", pack)
    client.times.add("put", put)
    end = time.perf_counter_ns()
    client.times.add("send", end - start)
    if trace.active:
        trace.stage("send", start, end, layer=flight.shape.layer, client=client.client_id,
                    seq=flight.shape.seq)
    if client.trace is not None:
        routed = filled + route  # the put's end includes what the HCA sent at once
        client.trace.append({
            "kind": "send", "layer": flight.shape.layer, "start_ns": start,
            "routed_ns": routed, "packed_ns": routed + pack, "put_ns": flight.issued_ns,
        })


def count_reply(client: Client, flight: Flight, s: int, now: int) -> None:
    assert flight.table is not None
    entry = flight.servers[s]
    rows = int(flight.batch_size[s])
    shape = flight.shape
    scales = -(-shape.hidden_size // shape.scale_block) if shape.scale_block else 0
    layout = RequestLayout.of(
        rows, shape.experts_per_row, shape.hidden_size * DATA_TYPE_BYTES[shape.data_type], scales
    )
    reply_bytes = shape.hidden_size * DATA_TYPE_BYTES[shape.reply_type]
    flight.table.links[s].counters.add(  # what the three puts carry, as native/client_trip.cpp
        rows=rows, bytes_sent=layout.end + 8,
        bytes_received=flight.reply_rows(s) * reply_bytes + ctypes.sizeof(ReplyHead) + 8,
        duration_ns=now - flight.issued_ns,
    )
    if client.trace is not None:
        head = flight.reply_head(s)
        client.trace.append({
            "kind": "reply", "layer": flight.shape.layer, "server": entry.server_id,
            "server_id": flight.table.links[s].server_id, "sent_ns": flight.issued_ns,
            "seen_ns": now, "queue_us": head.queue_us, "experts_us": head.experts_us,
        })


def client_stats(client: Client) -> dict[str, Any]:
    table = client.links.table
    alone = {link.server_id for i, link in enumerate(table.links) if i in table.alone}
    return {
        "epoch": table.epoch,
        "stages": client.times.summary(),
        "servers": {link.server_id: {"seat": link.seat, "experts": len(link.experts),
                                     "deadline_ms": round(
                                         1e3 * link.patience.seconds(link.server_id in alone), 3),
                                     **link.counters.summary()} for link in table.links},
        "skipped_ids": client.num_skipped_ids,
        "retries": client.num_retries,  # chunks sent again
        "lost": client.links.num_lost,  # times that a server was given up
        "dropped": {"pairs": client.dropped.total(), "experts": dict(client.dropped)},
        "errors": dict(client.errors),  # error completions, by syndrome
        "queue_depth": client.queue_depth,
    }
