"""The sending half of a client: route, pack and put one chunk; what to do about missing experts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from ..device_structs import SIGNAL_ADD, MessageShape
from ..errors import ConfigError
from ..message import DATA_TYPES, FP8_BLOCK, SlotShape
from .counting import sent
from .routing import RoutingTable, replica_rotation

if TYPE_CHECKING:
    from .client import Chunk, Client
    from .flight import Flight

SLICE_SECONDS = 0.05  # between looks at who may still come


def issue(client: Client, flight: Flight, chunk: Chunk, table: RoutingTable) -> None:
    """Routes, packs and puts one chunk; the flight then waits for its loaded servers.

    Experts that nobody in the table holds are settled as `on_missing` says. Raises NoServerError.
    """
    slots = client.links.shape
    assert slots is not None
    batch = chunk.handle.batch
    chunk.ids, chunk.dropped = batch.ids[chunk.begin : chunk.end], {}
    while True:
        start = time.perf_counter_ns()
        fill(client, flight, chunk, table, slots)
        filled = time.perf_counter_ns()
        flight.launch_send.run(client.engines)
        if flight.missing_expert.value < 0:
            break
        table = settle(client, chunk)
    if not chunk.skips_counted:  # a chunk that is sent again has the same ids
        chunk.skips_counted = True
        client.num_skipped_ids += flight.num_skipped.value - sum(chunk.dropped.values())
    flight.waiting = flight.loaded()
    for s in flight.waiting:
        table.links[s].previous_seq[flight.slot_idx] = client.seq
    flight.chunk, flight.issued_ns = chunk, time.perf_counter_ns()
    if not client.config.do_ibgda:  # the HCA wakes sleeping peers, direct stores do not
        for s in flight.waiting:
            table.links[s].endpoint.notify()
    sent(client, flight, start, filled)


def settle(client: Client, chunk: Chunk) -> RoutingTable:
    """A table by which the chunk can be routed.

    Either servers came for all of its experts, or those that nobody holds are dropped from its
    ids and counted. "raise" and "drop" wait only for servers that are about to be connected to.
    Raises NoServerError.
    """
    config, links = client.config, client.links
    limit = config.connect_timeout
    if config.on_missing == "wait" and config.missing_timeout is not None:
        limit = config.missing_timeout
    deadline = time.monotonic() + limit
    assert chunk.ids is not None
    needed = set(chunk.ids.flatten().tolist())
    while True:
        published, table = links.table, links.usable()
        missing = [e for e in table.missing() if e in needed]
        if not missing:
            return table
        if client.closed:
            raise ConfigError("the client was closed while a batch was waiting for a server")
        left = deadline - time.monotonic()
        if left <= 0 or (config.on_missing != "wait" and not links.is_coming(missing)):
            break
        links.wait(lambda t, seen=published: t is not seen, min(left, SLICE_SECONDS))
    if config.on_missing != "drop":
        raise links.no_server_error(chunk.handle.layer, missing)
    gone = torch.isin(chunk.ids, torch.tensor(missing, dtype=chunk.ids.dtype))
    experts, pairs = chunk.ids[gone].unique(return_counts=True)
    for expert, count in zip(experts.tolist(), pairs.tolist(), strict=True):
        chunk.dropped[expert] = chunk.dropped.get(expert, 0) + count
    chunk.ids = chunk.ids.masked_fill(gone, -1)
    return table


def fill(
    client: Client, flight: Flight, chunk: Chunk, table: RoutingTable, slots: SlotShape
) -> None:
    """Everything that changes from batch to batch in the kernels' arguments."""
    batch, ids = chunk.handle.batch, chunk.ids
    assert ids is not None
    weights, rows = batch.weights, batch.rows
    if chunk.end - chunk.begin != rows.shape[0]:
        weights, rows = (t[chunk.begin : chunk.end] for t in (weights, rows))
    flight.prepare(table, ids.shape[1], slots)
    client.seq += 1
    shape = MessageShape(
        hidden_size=slots.hidden_size, data_type=DATA_TYPES[rows.dtype],
        experts_per_row=ids.shape[1], num_experts=table.num_experts,
        reply_mode=slots.reply_mode, reply_type=DATA_TYPES[batch.output.dtype],
        client_id=client.client_id, layer=chunk.handle.layer, seq=client.seq, epoch=table.epoch,
    )
    route, pack = flight.route, flight.pack
    if batch.scales is not None:
        scales = batch.scales[chunk.begin : chunk.end]
        shape.scale_type, shape.scale_block = DATA_TYPES[torch.float32], FP8_BLOCK
        pack.scales, pack.scales_stride = scales.data_ptr(), scales.stride(0)
    flight.set_shape(shape)
    route.topk_ids = pack.topk_ids = ids.data_ptr()
    route.ids_stride = pack.ids_stride = ids.stride(0)
    route.id_bytes = pack.id_bytes = ids.element_size()
    route.num_tokens = ids.shape[0]
    route.rotation = replica_rotation(slots.reply_mode, shape.seq, shape.layer)
    pack.hidden = rows.data_ptr()
    pack.hidden_stride = rows.stride(0) * rows.element_size()
    pack.topk_weights, pack.weights_stride = weights.data_ptr(), weights.stride(0)
    if flight.put.signal_mode == SIGNAL_ADD:
        for s, link in enumerate(table.links):
            flight.servers[s].previous_seq = link.previous_seq[flight.slot_idx]
    flight.num_skipped.value, flight.missing_expert.value = 0, -1
    flight.status.code = 0
