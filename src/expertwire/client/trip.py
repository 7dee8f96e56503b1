"""A whole batch in one native call: the usual case of `Client.moe`, with nothing else in flight.

The call sends and combines chunk by chunk and stops where anything is out of the ordinary; what
is in flight then is handed to the general way (client.py, collect.py): it waits, retries, raises.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int, c_uint32, c_uint64, c_void_p

import torch

from .._native import declare
from ..config import ClientConfig
from ..device_structs import MessageShape
from ..errors import ExpertwireError
from ..launch import last_error
from ..message import DATA_TYPES, FP8_BLOCK, SlotShape
from ..observe.stats import StageTimes
from ..pacing import UNLIMITED, Pace
from .flight import Flight
from .inputs import Batch
from .routing import RoutingTable

STAGES = ("route", "pack", "put", "send", "wait", "combine")
SLICE_NS = 100_000_000  # longest wait inside the call, so that Ctrl-C gets its turn soon


class _NativeFlight(ctypes.Structure):
    """struct ew_flight of native/trip.hpp."""

    _fields_ = (
        ("send", c_void_p), ("combine", c_void_p), ("arrival_ns", c_void_p), ("seq", c_uint64),
        ("issued_ns", c_uint64),
    )


class _NativeBatch(ctypes.Structure):
    """struct ew_batch of native/trip.hpp."""

    _fields_ = (
        ("hca", c_void_p), ("flights", c_void_p), ("counters", c_void_p), ("notify", c_void_p),
        ("times", c_void_p * len(STAGES)), ("shape", MessageShape),
        ("hidden", c_uint64), ("hidden_stride", c_uint64),
        ("topk_ids", c_uint64), ("ids_stride", c_uint64),
        ("topk_weights", c_uint64), ("weights_stride", c_uint64),
        ("scales", c_uint64), ("scales_stride", c_uint64),
        ("output", c_uint64), ("output_stride", c_uint64),
        ("spin_ns", c_uint64), ("slice_ns", c_uint64), ("num_skipped", c_uint64),
        ("id_bytes", c_uint32), ("output_type", c_uint32), ("num_tokens", c_uint32),
        ("max_rows", c_uint32), ("num_flights", c_uint32), ("num_issued", c_uint32),
        ("num_combined", c_uint32),
    )


class Trip:
    """The native batch of one client, refilled from call to call. Used under the client's lock.

    flights: all of the client's, and none may be in use when `run` is called.
    """

    def __init__(self, flights: Sequence[Flight], config: ClientConfig, client_id: int):
        self._flights = flights
        self._do_ibgda = config.do_ibgda
        self._native = (_NativeFlight * len(flights))()
        self._batch = _NativeBatch(
            flights=ctypes.addressof(self._native), num_flights=len(flights),
            max_rows=config.max_rows, spin_ns=int(config.spin_us * 1e3), slice_ns=SLICE_NS,
            shape=MessageShape(client_id=client_id),
        )
        self._shape = self._batch.shape  # a view: making one costs more than using it
        self._address = ctypes.addressof(self._batch)
        self._running = False  # in the native call
        self._paced_for = UNLIMITED
        self._version = -1  # sum of the flights' versions that the native flights point to
        self._times: StageTimes | None = None
        self._run = declare("ew_client_trip", c_int, c_void_p)

    def pace(self, pace: Pace, credit: int) -> None:
        """Cuts the next batches such that no server has more than `credit` bytes under way."""
        if credit != self._paced_for:
            self._paced_for = credit
            self._batch.max_rows = pace.rows(credit)
            self._batch.num_flights = pace.slots(credit)

    @property
    def max_rows(self) -> int:
        """Tokens of each chunk but the last."""
        return self._batch.max_rows

    def run(
        self, hca: int, layer: int, batch: Batch, table: RoutingTable, slots: SlotShape,
        times: StageTimes, seq: int,
    ) -> bool:
        """Sends and combines the batch; True when it is done.

        seq: the last one given out before; `seq` of this object is the last one after. When it is
        not done, chunks [num_combined, num_issued) are in flight and later ones were not sent.
        """
        top_k = batch.top_k
        for flight in self._flights:
            flight.prepare(table, top_k, slots)
        if self._version != sum([f.version for f in self._flights]) or times is not self._times:
            self._prepare(hca, table, top_k, slots, times)
        native, rows, ids, weights = self._batch, batch.rows, batch.ids, batch.weights
        output, scales = batch.output, batch.scales
        shape = self._shape
        shape.layer, shape.seq = layer, seq
        shape.data_type, native.output_type = DATA_TYPES[rows.dtype], DATA_TYPES[output.dtype]
        shape.reply_type = native.output_type
        native.hidden = rows.data_ptr()
        native.hidden_stride = rows.stride(0) * rows.itemsize
        native.topk_ids, native.ids_stride = ids.data_ptr(), ids.stride(0)
        native.id_bytes = ids.itemsize
        native.topk_weights, native.weights_stride = weights.data_ptr(), weights.stride(0)
        if scales is not None:
            shape.scale_type, shape.scale_block = DATA_TYPES[torch.float32], FP8_BLOCK
            native.scales, native.scales_stride = scales.data_ptr(), scales.stride(0)
        native.output = output.data_ptr()
        native.output_stride = output.stride(0) * output.itemsize
        native.num_tokens = batch.num_tokens
        self._running = True
        try:
            code = self._run(self._address)
        finally:
            self._running = False
        if code < 0:
            raise ExpertwireError(f"launch failed: {last_error()}")
        return code == 0

    @property
    def seq(self) -> int:
        return self._shape.seq

    @property
    def num_skipped(self) -> int:
        return self._batch.num_skipped

    @property
    def num_combined(self) -> int:
        return self._batch.num_combined

    @property
    def num_open(self) -> int:
        """Chunks that the call which runs now has in flight."""
        return self._batch.num_issued - self._batch.num_combined if self._running else 0

    def in_flight(self) -> list[tuple[int, Flight]]:
        """(chunk, its flight) of what was sent and not combined, oldest first."""
        left = []
        for chunk in range(self._batch.num_combined, self._batch.num_issued):
            idx = chunk % self._batch.num_flights
            flight, native = self._flights[idx], self._native[idx]
            flight.set_shape(flight.combine.shape)
            flight.issued_ns = native.issued_ns
            flight.waiting = flight.loaded()
            left.append((chunk, flight))
        return left

    def _prepare(
        self, hca: int, table: RoutingTable, top_k: int, slots: SlotShape, times: StageTimes
    ) -> None:
        for native, flight in zip(self._native, self._flights, strict=True):
            native.send, native.combine = flight.launch_send.address, flight.launch_combine.address
            native.arrival_ns = flight.arrivals.ctypes.data
        self._counters = (c_void_p * max(len(table.links), 1))(
            *[link.counters.address for link in table.links]
        )
        self._notify = (c_void_p * max(len(table.links), 1))(
            *[link.endpoint.peer_pointer for link in table.links]
        )
        batch, shape = self._batch, self._shape
        batch.hca = hca
        batch.counters = ctypes.addressof(self._counters)
        batch.notify = None if self._do_ibgda else ctypes.addressof(self._notify)
        batch.times = (c_void_p * len(STAGES))(*[times.ring(stage).address for stage in STAGES])
        shape.hidden_size, shape.num_experts = slots.hidden_size, table.num_experts
        shape.experts_per_row, shape.reply_mode = top_k, slots.reply_mode
        shape.epoch = table.epoch
        self._version = sum([flight.version for flight in self._flights])
        self._times = times
