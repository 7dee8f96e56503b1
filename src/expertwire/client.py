"""The attention side: route tokens to expert servers, push one message to each, add the replies.

    client = Client("127.0.0.1:7700")
    out = client.moe(layer, hidden, topk_ids, topk_weights)     # or, in two halves:
    handle = client.dispatch(layer, hidden, topk_ids, topk_weights)
    out = handle.combine()

A batch larger than a slot goes as several chunks of tokens; a chunk takes one slot (the same index
at every server) from its dispatch to its combine. A chunk whose server dies is sent again, whole,
to whoever holds the experts now: the late replies of the old try carry an old seq and do not count.
"""

from __future__ import annotations

import collections
import os
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from . import collect
from .config import ClientConfig
from .control import load_token
from .device_structs import SIGNAL_ADD, MessageShape
from .errors import ConfigError, ExpertwireError, WaitTimeout
from .flight import Chunk, Flight, Handle
from .hca import open_hca
from .inputs import Batch, InputCheck
from .launch import hca_array
from .links import Links
from .membership import Membership
from .message import DATA_TYPES, FP8_BLOCK, ReplyMode, SlotShape, dtype_of
from .routing import RoutingTable
from .stats import StageTimes
from .trip import Trip

if TYPE_CHECKING:
    from .registry import Registry

LET_GO_SECONDS = 1.5  # for a batch that is under way when the client is closed

class Client:
    """Sends batches of one model's MoE layers to its expert servers. Thread-safe.

    registry: "HOST:PORT" of the registry, or a running Registry object; it need not be up yet.
    token: the shared secret, at least 16 bytes; default: EXPERTWIRE_TOKEN or the token file.
    name: shown in status; default client-PID and some random digits.
    config: ClientConfig; single settings may be given as keywords instead.

    Returns at once and connects in the background; `wait_ready` waits for servers. Raises
    ConfigError for a malformed address or settings that do not fit, AuthError for a token file
    that others can read.
    """

    def __init__(
        self, registry: str | Registry, *, token: bytes | None = None, name: str | None = None,
        config: ClientConfig | None = None, **settings: Any,
    ):
        if config is not None and settings:
            raise ConfigError("give either config or single settings, not both")
        self.config = config or ClientConfig(**settings)
        self.name = name or f"client-{os.getpid()}-{secrets.token_hex(3)}"
        self.client_id = secrets.randbits(31) + 1
        self.lock = threading.RLock()
        self.times = StageTimes()
        self.num_skipped_ids = 0
        self.num_retries = 0
        self.trace: list | None = None  # set to a list to record flight spans (collect.py)
        self._seq = 0
        self.closed = False
        address = registry if isinstance(registry, str) else registry.address
        token = load_token() if token is None else token
        self.hca = open_hca("soft")
        self.engines = hca_array(self.hca.pointer)
        self.spin_ns = int(self.config.spin_us * 1e3)
        self._flights = [Flight(i, self.config) for i in range(self.config.num_slots)]
        self._trip = Trip(self._flights, self.config, self.client_id)
        self._signal_adds = self.config.signal_mode != "write"  # needs each slot's previous seq
        self._check: InputCheck | None = None
        self._free = collections.deque(self._flights)
        self._queued: collections.deque[Chunk] = collections.deque()
        self.in_flight: collections.deque[Flight] = collections.deque()
        self.membership = Membership(address, token, client_name=self.name)
        self.links = Links(
            self.hca, self.membership, token=token, client_id=self.client_id, name=self.name,
            config=self.config, make_shape=self._make_shape,
        )
        self.membership.on_change = self.links.wake
        self.links.start()
        self.links.wake()

    # ---------------------------------------------------------------- public

    def moe(
        self, layer: int, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """One MoE layer: sum over k of topk_weights[t, k] * expert[topk_ids[t, k]](hidden[t]).

        layer: index among the model's MoE layers, from 0. hidden: [T, H] in the dtype that the
        servers compute in, on the CPU, any strides; T may be 0. topk_ids: [T, K] int64 or int32,
        K up to the model's top-k; ids below 0 or >= num_experts are skipped and counted,
        duplicates add up. topk_weights: [T, K] float. Returns [T, H] in hidden's dtype. Raises as
        `dispatch` and `Handle.combine`.
        """
        with self.lock:
            handle, table = self._begin(layer, hidden, topk_ids, topk_weights)
            if not self._trip_to_the_end(handle, table):
                self._issue_queued(table)
            return handle.combine()

    def dispatch(
        self, layer: int, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> Handle:
        """Sends a batch and returns without waiting for it; arguments as for `moe`.

        The tensors must not change until the handle is combined. Raises ConfigError for inputs
        that do not fit the model, NoServerError when an expert is held by nobody reachable within
        `connect_timeout`.
        """
        with self.lock:
            handle, table = self._begin(layer, hidden, topk_ids, topk_weights)
            self._queue(handle, 0)
            self._issue_queued(table)
            if handle.error is not None and handle.num_open == 0:
                raise handle.error
        self.hca.kick()  # nobody waits yet, so the engine's own thread has to send
        return handle

    def wait_ready(self, timeout: float | None = None) -> dict:
        """Waits until every expert of the model has a connected server; returns the model info.

        Raises NoServerError naming the missing experts when `timeout` (default
        connect_timeout) seconds are over.
        """
        timeout = self.config.connect_timeout if timeout is None else timeout
        table = self.links.wait(lambda t: t.num_experts > 0 and not t.missing(), timeout)
        missing = table.missing()
        if missing or table.num_experts == 0:
            raise self.links.no_server_error(0, missing)
        return dict(self.links.model or {})

    @property
    def model_info(self) -> dict | None:
        """What the servers say of their model (None before the first one is connected)."""
        return self.links.model

    def stats(self) -> dict:
        """Counters and stage times: {"stages": ..., "servers": {id: ...}, ...} (times in us)."""
        return collect.client_stats(self)

    def close(self) -> None:
        """Leaves: closes connections, threads and shared memory, in under 5 s. Idempotent.

        Threads that wait in `moe`, `dispatch`, `combine` or `wait_ready` are woken: ConfigError
        there. Raises WaitTimeout if one does not let go; its memory then stays until the process
        ends.
        """
        if self.closed:
            return
        self.closed = True
        self.membership.on_change = None
        self.links.stop()
        self.hca.interrupt()
        self.membership.close()
        if not self.lock.acquire(timeout=LET_GO_SECONDS):
            raise WaitTimeout(
                f"a batch did not end within {LET_GO_SECONDS} s of closing the client", "close"
            )
        try:
            self.links.close()
            self.hca.close()
        finally:
            self.lock.release()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- sending

    def _begin(
        self, layer: int, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> tuple[Handle, RoutingTable]:
        self._close_retired()  # before the table is read: what is retired is in no new table
        table = self._ready_table(layer)
        assert self._check is not None
        self._check(layer, hidden, topk_ids, topk_weights)
        return Handle(self, layer, Batch(hidden, topk_ids, topk_weights, self.config.fp8)), table

    def _queue(self, handle: Handle, begin: int) -> None:
        """Appends the chunks of the tokens from `begin` on."""
        num_tokens = handle.batch.num_tokens
        for at in range(begin, num_tokens, self.config.max_rows):
            chunk = Chunk(handle, at, min(at + self.config.max_rows, num_tokens))
            self._queued.append(chunk)
            handle.num_open += 1

    def _trip_to_the_end(self, handle: Handle, table: RoutingTable) -> bool:
        """The usual case in one native call (trip.py). False: the rest is in flight or queued."""
        if self.in_flight or self._queued or self.trace is not None or self._signal_adds:
            self._queue(handle, 0)
            return False
        batch, max_rows = handle.batch, self.config.max_rows
        assert self.links.shape is not None
        if batch.num_tokens == 0:
            return True
        trip = self._trip
        try:
            done = trip.run(self.hca.pointer, handle.layer, batch, table, self.links.shape,
                            self.times, self._seq)
        finally:  # also when interrupted: no seq is ever used twice
            self._seq = max(self._seq, trip.seq)
        self.num_skipped_ids += trip.num_skipped
        if done:
            return True
        sent = trip.num_combined
        for i, flight in trip.in_flight():
            end = min((i + 1) * max_rows, batch.num_tokens)
            flight.chunk = Chunk(handle, i * max_rows, end)
            self._free.remove(flight)
            self.in_flight.append(flight)
            handle.num_open += 1
            sent = i + 1
        self._queue(handle, sent * max_rows)
        return False

    def _make_shape(self, model: dict) -> SlotShape:
        dtype = dtype_of(model["dtype"])
        return SlotShape(
            num_slots=self.config.num_slots, max_rows=self.config.max_rows,
            experts_per_row=model["top_k"], hidden_size=model["hidden_size"],
            element_bytes=dtype.itemsize, fp8=self.config.fp8,
            reply_mode=int(ReplyMode.PER_EXPERT if self.config.batch_invariant else ReplyMode.SUM),
            reply_element_bytes=dtype.itemsize,
        )

    def _ready_table(self, layer: int) -> RoutingTable:
        """The routing table, once there is a server. Raises NoServerError."""
        if self.closed:
            raise ConfigError("the client is closed")
        table = self.links.table
        if not table.links:
            table = self.links.wait(lambda t: bool(t.links), self.config.connect_timeout)
        model, shape = self.links.model, self.links.shape
        if not table.links or model is None:
            raise self.links.no_server_error(layer, [])
        if self._check is None:
            assert shape is not None
            self._check = InputCheck(model, shape.experts_per_row)
        return table

    def _issue_queued(self, table: RoutingTable) -> None:
        while self._queued and self._free:
            # The slot freed last: its memory is still in the caches, at both ends.
            chunk, flight = self._queued.popleft(), self._free.pop()
            if chunk.handle.error is not None:
                self._end_chunk(flight, chunk, None)
                continue
            try:
                self.issue(flight, chunk, table)
            except ExpertwireError as err:
                self._end_chunk(flight, chunk, err)
            except BaseException as err:  # interrupted: the slot must not be lost
                self._end_chunk(flight, chunk, ExpertwireError(f"batch abandoned: {err!r}"))
                raise
            else:
                self.in_flight.append(flight)

    def issue(self, flight: Flight, chunk: Chunk, table: RoutingTable) -> None:
        """Routes, packs and puts one chunk; the flight then waits for its loaded servers.

        Waits for a new table if an expert is held by nobody. Raises NoServerError.
        """
        slots = self.links.shape
        assert slots is not None
        deadline = time.monotonic() + self.config.connect_timeout
        while True:
            start = time.perf_counter_ns()
            self._fill(flight, chunk, table, slots)
            filled = time.perf_counter_ns()
            flight.launch_send.run(self.engines)
            if flight.missing_expert.value < 0:
                break
            left, old = deadline - time.monotonic(), table
            if left > 0:
                table = self.links.wait(lambda t, old=old: t is not old, left)
            if table is old:
                needed = set(chunk.handle.batch.ids[chunk.begin : chunk.end].flatten().tolist())
                missing = [e for e in table.missing() if e in needed]
                raise self.links.no_server_error(chunk.handle.layer, missing)
        self.num_skipped_ids += flight.num_skipped.value
        flight.waiting = flight.loaded()
        for s in flight.waiting:
            table.links[s].previous_seq[flight.slot_idx] = self._seq
        flight.chunk, flight.issued_ns = chunk, time.perf_counter_ns()
        if not self.config.do_ibgda:  # the HCA wakes sleeping peers, direct stores do not
            for s in flight.waiting:
                table.links[s].endpoint.notify()
        collect.sent(self, flight, start, filled)

    def _fill(self, flight: Flight, chunk: Chunk, table: RoutingTable, slots: SlotShape) -> None:
        """Everything that changes from batch to batch in the kernels' arguments."""
        batch = chunk.handle.batch
        ids, weights, rows = batch.ids, batch.weights, batch.rows
        if chunk.end - chunk.begin != ids.shape[0]:
            ids, weights, rows = (t[chunk.begin : chunk.end] for t in (ids, weights, rows))
        flight.prepare(table, ids.shape[1], slots)
        self._seq += 1
        shape = MessageShape(
            hidden_size=slots.hidden_size, data_type=DATA_TYPES[rows.dtype],
            experts_per_row=ids.shape[1], num_experts=table.num_experts,
            reply_mode=slots.reply_mode, reply_type=DATA_TYPES[batch.output.dtype],
            client_id=self.client_id, layer=chunk.handle.layer, seq=self._seq, epoch=table.epoch,
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
        pack.hidden = rows.data_ptr()
        pack.hidden_stride = rows.stride(0) * rows.element_size()
        pack.topk_weights, pack.weights_stride = weights.data_ptr(), weights.stride(0)
        if flight.put.signal_mode == SIGNAL_ADD:
            for s, link in enumerate(table.links):
                flight.servers[s].previous_seq = link.previous_seq[flight.slot_idx]
        flight.num_skipped.value, flight.missing_expert.value = 0, -1
        flight.status.code = 0

    # ---------------------------------------------------------------- receiving

    def finish_oldest(self) -> None:
        """Waits for the oldest chunk in flight, combines it, and sends the next one."""
        flight = self.in_flight.popleft()
        chunk = flight.chunk
        assert chunk is not None
        error: Exception | None = None
        try:
            collect.receive(self, flight, chunk)
        except ExpertwireError as err:
            error = err
        except BaseException as err:  # interrupted: the slot is free again, the batch is not done
            self._end_chunk(flight, chunk, ExpertwireError(f"batch abandoned: {err!r}"))
            raise
        self._end_chunk(flight, chunk, error)
        self._issue_queued(self.links.table)

    def _end_chunk(self, flight: Flight, chunk: Chunk, error: Exception | None) -> None:
        flight.chunk = None
        self._free.append(flight)
        chunk.handle.num_open -= 1
        if error is not None and chunk.handle.error is None:
            chunk.handle.error = error

    def _close_retired(self) -> None:
        """Closes connections of servers that left, once no batch in flight was routed by them."""
        if not self.links.retired or self.in_flight or self.links.shape is None:
            return
        for flight in self._flights:
            flight.prepare(RoutingTable(0, 0, []), 1, self.links.shape)
        while self.links.retired:
            self.links.retired.pop().close()
