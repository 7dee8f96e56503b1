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
from typing import TYPE_CHECKING, Any

import torch

from . import collect, send
from .config import ClientConfig
from .control import load_token
from .errors import ConfigError, ExpertwireError, InFlightError, WaitTimeout
from .flight import Chunk, Flight, Handle
from .hca import open_hca
from .inputs import Batch, InputCheck
from .launch import hca_array
from .links import Links
from .membership import Membership
from .message import ReplyMode, SlotShape, dtype_of
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
        self.dropped: collections.Counter[int] = collections.Counter()  # pairs by expert
        self._num_open = 0  # batches that are not combined yet
        self.trace: list | None = None  # set to a list to record flight spans (collect.py)
        self.seq = 0  # the last one given out
        self.closed = False
        address = registry if isinstance(registry, str) else registry.address
        token = load_token() if token is None else token
        self.hca = open_hca(self.config.hca)
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
            config=self.config, make_shape=self._make_shape, release=self.release_retired,
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
            self._queued.append(self._open(handle, at, min(at + self.config.max_rows, num_tokens)))

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
        batch, max_rows = handle.batch, self.config.max_rows
        assert self.links.shape is not None
        if batch.num_tokens == 0:
            return True
        trip = self._trip
        try:
            done = trip.run(self.hca.pointer, handle.layer, batch, table, self.links.shape,
                            self.times, self.seq)
        finally:  # also when interrupted: no seq is ever used twice
            self.seq = max(self.seq, trip.seq)
        self.num_skipped_ids += trip.num_skipped
        if done:
            return True
        sent = trip.num_combined
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
        return table  # which may have become empty: that is for `on_missing` to settle

    def _issue_queued(self, table: RoutingTable) -> None:
        while self._queued and self._free:
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

    def release_retired(self) -> None:
        """Closes connections that are in no table any more, from any thread; if this client is at
        work, that is left for later."""
        if self.lock.acquire(blocking=False):
            try:
                if not self.closed:
                    self._close_retired()
            finally:
                self.lock.release()

    def _close_retired(self) -> None:
        """Closes connections of servers that left, unless a batch in flight was routed by them."""
        if not self.links.retired or self.links.shape is None:
            return
        in_use = [flight for flight in self._flights if flight.chunk is not None]
        held = {id(link) for flight in in_use if flight.table for link in flight.table.links}
        for link in [link for link in self.links.retired if id(link) not in held]:
            for flight in self._flights:
                if flight.table and link in flight.table.links:
                    flight.prepare(RoutingTable(0, 0, []), 1, self.links.shape)
            self.links.retired.remove(link)
            link.close()
