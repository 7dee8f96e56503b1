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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..config import ClientConfig
from ..control.data_address import own_data_host
from ..control.frames import load_token
from ..errors import ConfigError, ExpertwireError, InFlightError, WaitTimeout
from ..hca import open_hca
from ..launch import hca_array
from ..message import ReplyMode, SlotShape, dtype_of
from ..observe.reports import client_report
from ..observe.stats import StageTimes
from ..pacing import Pace
from ..registry.membership import Membership
from ..trace import recorder as trace
from . import collect, send
from .counting import client_stats
from .flight import Chunk, Flight, Handle
from .inputs import Batch, InputCheck
from .links import Links
from .routing import RoutingTable
from .trip import Trip

if TYPE_CHECKING:
    from ..registry.registry import Registry

LET_GO_SECONDS = 1.5  # for a batch that is under way when the client is closed

class Client:
    """Sends batches of one model's MoE layers to its expert servers. Thread-safe.

    registry: "HOST:PORT" of the registry, or a running Registry object; it need not be up yet.
    token: the shared secret, at least 16 bytes; default: EXPERTWIRE_TOKEN or the token file.
    name: shown in status; default client-PID and some random digits. The registry adds a number to
        one that another client has already.
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
        trace.join(f"client {self.name}")
        self.lock = threading.RLock()
        self.times = StageTimes()
        self.num_skipped_ids = 0
        self.num_retries = 0
        self.errors: collections.Counter[str] = collections.Counter()  # completions, by syndrome
        self.dropped: collections.Counter[int] = collections.Counter()  # pairs by expert
        self._num_open = 0  # batches that are not combined yet
        self.trace: list | None = None  # set to a list to record flight spans (counting.py)
        self.seq = 0  # the last one given out
        self.closed = False
        address = registry if isinstance(registry, str) else registry.address
        token = load_token() if token is None else token
        self.hca = open_hca(self.config.hca, local_address=own_data_host(self.config.hca, address))
        self.engines = hca_array(self.hca.pointer)
        self.spin_ns = int(self.config.spin_us * 1e3)
        self._flights = [Flight(i, self.config) for i in range(self.config.num_slots)]
        self._trip = Trip(self._flights, self.config, self.client_id)
        self._signal_adds = self.config.signal_mode == "add"  # needs each slot's previous seq
        self._check: InputCheck | None = None
        self._pace: Pace | None = None
        self._free = collections.deque(self._flights)
        self._queued: collections.deque[Chunk] = collections.deque()
        self.in_flight: collections.deque[Flight] = collections.deque()
        self.membership = Membership(
            address, token, client_name=self.name, stats=lambda: client_report(self)
        )
        self.links = Links(
            self.hca, self.membership, token=token, client_id=self.client_id, name=self.name,
            config=self.config, make_shape=self._make_shape, release=self.try_release,
        )
        self.membership.on_change = self.links.wake
        self.links.start()
        self.links.wake()

    # ---------------------------------------------------------------- public

    def moe(
        self, layer: int, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """One MoE layer: `sum over k of topk_weights[t, k] * expert[topk_ids[t, k]](hidden[t])`.

        layer: index among the model's MoE layers, from 0. hidden: [T, H] in the dtype that the
        servers compute in, on the CPU, any strides; T may be 0. topk_ids: [T, K] int64 or int32,
        K up to the model's top-k; ids below 0 or >= num_experts are skipped and counted,
        duplicates add up. topk_weights: [T, K] float. Returns [T, H] in hidden's dtype. Raises as
        `dispatch` and `Handle.combine`.
        """
        with self.lock:
            start = time.perf_counter_ns() if trace.active else 0
            handle, table = self._begin(layer, hidden, topk_ids, topk_weights)
            if not self._trip_to_the_end(handle, table):
                self._issue_queued(table)
            output = handle.combine()
            if trace.active:
                trace.stage("moe", start, time.perf_counter_ns(), layer=layer,
                            client=self.client_id, rows=hidden.shape[0])
            return output

    def dispatch(
        self, layer: int, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> Handle:
        """Sends a batch and returns without waiting for it; arguments as for `moe`.

        The tensors must not change until the handle is combined. Raises ConfigError for inputs
        that do not fit the model, NoServerError when an expert is held by nobody reachable and
        `on_missing` does not say otherwise, InFlightError if `max_in_flight` batches are not
        combined yet and `on_full` is "raise"; with "wait" the oldest of them is received first.
        """
        with self.lock:
            handle, table = self._begin(layer, hidden, topk_ids, topk_weights)
            self._make_room()
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

    @property
    def queue_depth(self) -> int:
        """Chunks (at most max_rows tokens each) that are in flight or wait for a slot."""
        return len(self.in_flight) + len(self._queued) + self._trip.num_open

    def is_ready(self) -> bool:
        """Whether every expert is held by a server that this client is connected to."""
        return not self.links.table.missing()

    def recover(self) -> None:
        """Nothing: this client connects anew by itself."""

    def stats(self) -> dict:
        """Counters and stage times: {"stages": ..., "servers": {id: ...}, ...} (times in us)."""
        return client_stats(self)

    def dump(self, path: str | Path) -> None:
        """Writes the send queues to all servers to a file, for `expertwire wqe decode`.

        As they are now: racy while a batch is on its way. Raises OSError.
        """
        with self.lock, open(path, "wb") as out:
            for link in self.links.table.links:
                link.endpoint.dump_to(out, link.server_id)

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
        self._release()  # before the table is read: what is retired is in no new table
        table = self._ready_table(layer)
        assert self._check is not None
        self._check(layer, hidden, topk_ids, topk_weights)
        return Handle(self, layer, Batch(hidden, topk_ids, topk_weights, self.config.fp8)), table

    def _queue(self, handle: Handle, begin: int) -> None:
        """Appends the chunks of the tokens from `begin` on."""
        num_tokens = handle.batch.num_tokens
        rows = self._pace.rows(self.links.credit) if self._pace else self.config.max_rows
        for at in range(begin, num_tokens, rows):
            self._queued.append(self._open(handle, at, min(at + rows, num_tokens)))

    def _open(self, handle: Handle, begin: int, end: int) -> Chunk:
        self._num_open += handle.num_open == 0
        handle.num_open += 1
        return Chunk(handle, begin, end)

    def _make_room(self) -> None:
        """Until fewer than max_in_flight batches are open. Raises InFlightError."""
        limit = self.config.max_in_flight or self.config.num_slots
        while self._num_open >= limit:
            if self.config.on_full == "raise":
                raise InFlightError(
                    f"{self._num_open} batches are in flight, max_in_flight is {limit}; combine "
                    'one first, or set on_full="wait"'
                )
            self.finish_oldest()

    def _trip_to_the_end(self, handle: Handle, table: RoutingTable) -> bool:
        """The usual case in one native call (trip.py). False: the rest is in flight or queued."""
        if self.in_flight or self._queued or self.trace is not None or self._signal_adds:
            self._queue(handle, 0)
            return False
        batch = handle.batch
        assert self.links.shape is not None and self._pace is not None
        if batch.num_tokens == 0:
            return True
        trip = self._trip
        try:
            trip.pace(self._pace, self.links.credit)
            done = trip.run(self.hca.pointer, handle.layer, batch, table, self.links.shape,
                            self.times, self.seq)
        finally:  # also when interrupted: no seq is ever used twice
            self.seq = max(self.seq, trip.seq)
        self.num_skipped_ids += trip.num_skipped
        if done:
            return True
        sent, max_rows = trip.num_combined, trip.max_rows
        for i, flight in trip.in_flight():
            end = min((i + 1) * max_rows, batch.num_tokens)
            flight.chunk = self._open(handle, i * max_rows, end)
            flight.chunk.skips_counted = True
            self._free.remove(flight)
            self.in_flight.append(flight)
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
        if self._check is None:
            if not table.links:
                table = self.links.wait(lambda t: bool(t.links), self.config.connect_timeout)
            model, shape = self.links.model, self.links.shape
            if not table.links or model is None or shape is None:
                raise self.links.no_server_error(layer, [])
            self._check = InputCheck(model, shape.experts_per_row)
            self._pace = Pace.of(shape)
        return table  # which may have become empty: that is for `on_missing` to settle

    def _issue_queued(self, table: RoutingTable) -> None:
        while self._queued and self._free and self._may_send(self._queued[0]):
            # The slot freed last: its memory is still in the caches, at both ends.
            chunk, flight = self._queued.popleft(), self._free.pop()
            if chunk.handle.error is not None:
                self._end_chunk(flight, chunk, None)
                continue
            try:
                send.issue(self, flight, chunk, table)
            except ExpertwireError as err:
                self._end_chunk(flight, chunk, err)
            except BaseException as err:  # interrupted: the slot must not be lost
                self._end_chunk(flight, chunk, ExpertwireError(f"batch abandoned: {err!r}"))
                raise
            else:
                self.in_flight.append(flight)

    def _may_send(self, chunk: Chunk) -> bool:
        """Whether the servers have room for one more message of ours (pacing.py)."""
        assert self._pace is not None
        under_way = [f.chunk.end - f.chunk.begin for f in self.in_flight if f.chunk is not None]
        return self._pace.may_send(self.links.credit, under_way, chunk.end - chunk.begin)

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
        self._issue_queued(self.links.usable())

    def _end_chunk(self, flight: Flight, chunk: Chunk, error: Exception | None) -> None:
        flight.chunk = None
        self._free.append(flight)
        chunk.handle.num_open -= 1
        self._num_open -= chunk.handle.num_open == 0
        if error is not None and chunk.handle.error is None:
            chunk.handle.error = error

    def try_release(self) -> None:
        """Lets go of what is in no table any more, from any thread; if this client is at work,
        that is left for later."""
        if self.lock.acquire(blocking=False):
            try:
                if not self.closed:
                    self._release()
            finally:
                self.lock.release()

    def _release(self) -> None:
        """Closes connections of servers that left, unless a batch in flight was routed by them."""
        if not self.links.is_holding:
            return
        in_use = [f for f in self._flights if f.chunk is not None and f.table is not None]
        epochs = [flight.table.epoch for flight in in_use if flight.table is not None]
        self.links.released_epoch = min([self.links.table.epoch, *epochs])
        if not self.links.retired or self.links.shape is None:
            return
        held = {id(link) for flight in in_use if flight.table for link in flight.table.links}
        for link in [link for link in self.links.retired if id(link) not in held]:
            for flight in self._flights:
                if flight.table and link in flight.table.links:
                    flight.prepare(RoutingTable(0, 0, []), 1, self.links.shape)
            self.links.retired.remove(link)
            link.close()
