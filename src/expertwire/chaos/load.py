"""The load of a chaos plan: clients that send batches without a pause and check every row."""

from __future__ import annotations

import random
import threading
import time
from array import array
from typing import Any

import torch

from ..client.client import Client
from ..client.patience import ENOUGH
from ..errors import ExpertwireError
from ..model.checkpoint import load_experts
from ..model.reference import moe_reference

NUM_BATCHES = 8  # different ones per layer, in turns
# Servers compute in float32; sums of other order differ by a few units in the last place.
ATOL, RTOL = 2e-5, 1e-5


class Oracle:
    """Batches of the model, and what each layer must make of them, computed in this process.

    A row is right if it is within ATOL and RTOL of the layer in plain torch (reference.py), and has
    the same bits as the first time that the batch was seen: failures must not show in one bit.
    """

    def __init__(self, model: str, *, rows: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        # Small products: threads that wait for each other take longer than one that computes, and
        # much longer where other processes want the cores.
        torch.set_num_threads(1)
        shard = load_experts(model, None, dtype="float32")
        self.num_layers = shard.num_layers
        num_experts = len(shard.experts)
        self.batches = []
        for _ in range(NUM_BATCHES):
            hidden = torch.randn(rows, shard.hidden_size, generator=generator)
            ids = torch.randint(0, num_experts, (rows, 2), generator=generator)
            self.batches.append((hidden, ids, torch.rand(rows, 2, generator=generator)))
        with torch.inference_mode():
            self.want = [[
                moe_reference(*batch, lambda e, rows, layer=layer: shard.layers[layer].forward(
                    e, rows), num_experts) for batch in self.batches
            ] for layer in range(self.num_layers)]
        self._bits: dict[tuple[int, int], torch.Tensor] = {}
        self._lock = threading.Lock()

    def wrong_rows(self, layer: int, idx: int, out: torch.Tensor) -> int:
        """How many rows of a result are not what they must be."""
        with self._lock:
            bits = self._bits.setdefault((layer, idx), out)
        if out is not bits and torch.equal(out, bits):
            return 0  # the first one was compared with the reference
        right = torch.isclose(out, self.want[layer][idx], rtol=RTOL, atol=ATOL) & (out == bits)
        return int((~right.all(dim=1)).sum())


class StepLog:
    """The steps of one client, in order."""

    def __init__(self) -> None:
        self.started_ns = array("q")  # CLOCK_MONOTONIC
        self.ended_ns = array("q")
        self.cpu_ns = array("q")  # of the thread that called

    def add(self, started_ns: int, ended_ns: int, cpu_ns: int) -> None:
        self.started_ns.append(started_ns)
        self.ended_ns.append(ended_ns)
        self.cpu_ns.append(cpu_ns)


class LoadThread:
    """One client in a thread. A step is one batch through one layer.

    twin: a client of a system of its own that nothing happens to. It does every step, too, right
    before or right after the client, as `seed` decides: what the rest of the machine does meets
    both, and neither always comes first.
    """

    def __init__(self, name: str, address: str, token: bytes, oracle: Oracle,
                 twin: Client | None = None, seed: int = 0, **settings: Any):
        self.client = Client(address, token=token, name=name, **settings)
        self.twin = twin
        self.name = name
        self.oracle = oracle
        self.log = StepLog()
        self.twin_log = StepLog()  # entry for entry the same steps
        self.slow = 0.0  # this part of every step of the client is added to it
        self.wrong_tokens = 0
        self.lost: list[str] = []  # what each step that failed raised
        self.broken: BaseException | None = None  # our own bug
        self._random = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"chaos-{name}", daemon=True)

    @property
    def num_steps(self) -> int:
        return len(self.log.ended_ns)

    def connected(self) -> set[str]:
        """Names of the servers that the client would send to."""
        return {link.server_id for link in self.client.links.usable().links if not link.draining}

    def deadline_ms(self) -> float:
        """The longest that a server which is known by now would be waited for; 0.0: none is."""
        table = self.client.links.table
        return max((1e3 * link.patience.seconds(i in table.alone)
                    for i, link in enumerate(table.links)
                    if link.patience.counters.durations.count >= ENOUGH), default=0.0)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, not the client."""
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        clients = [self.client] if self.twin is None else [self.client, self.twin]
        step = 0
        try:
            while not self._stop.is_set():
                layer, idx = step % self.oracle.num_layers, step % NUM_BATCHES
                self._random.shuffle(clients)
                try:
                    times = {client: self._step(client, layer, idx) for client in clients}
                except ExpertwireError as err:
                    self.lost.append(f"{type(err).__name__}: {err}")
                    self._stop.wait(0.01)  # a system without servers is not hammered
                else:
                    self.log.add(*times[self.client])
                    if self.twin is not None:
                        self.twin_log.add(*times[self.twin])
                step += 1 if idx + 1 < NUM_BATCHES else 2  # every batch meets every layer
        except BaseException as err:
            self.broken = err

    def _step(self, client: Client, layer: int, idx: int) -> tuple[int, int, int]:
        """(started, ended, processor time of this thread in between), in ns."""
        started, cpu = time.monotonic_ns(), time.thread_time_ns()
        out = client.moe(layer, *self.oracle.batches[idx])
        ended = time.monotonic_ns()
        if client is self.client and self.slow:
            until = ended + int(self.slow * (ended - started))
            while (ended := time.monotonic_ns()) < until:
                pass
        cpu = time.thread_time_ns() - cpu
        self.wrong_tokens += self.oracle.wrong_rows(layer, idx, out)
        return started, ended, cpu
