"""Incast: many clients on few servers, with and without the credits of expertwire.pacing.

    python bench/incast.py [--milliseconds 12] [--buffer-kb 4096] [--seed 0]

A simulation in virtual time, no hardware: what is real in it are the two rules, `pacing.shares`
(the server's) and `pacing.Pace` (the client's). Modelled are clients that send batches without a
pause, as messages to all servers, some chunks at a time; links of equal rate; in front of every
server a switch port with a buffer that drops what does not fit; a reliable transport that goes back
to the first lost segment when the receiver sees a gap, or when a timer ends (go-back-N, InfiniBand
specification volume 1, section 9.7; timer values are 4.096 us * 2^n, section 9.7.6.1.3).
Goodput counts each byte once. The last line is JSON.
"""

from __future__ import annotations

import argparse
import collections
import heapq
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from expertwire.message import SlotShape
from expertwire.pacing import UNLIMITED, Pace, shares

RATIOS = ((8, 8), (16, 8), (32, 8))
WARM_UP_MS = 1.0  # not counted


@dataclass(frozen=True)
class Network:
    """Times in ns, sizes in bytes, rates in bytes per ns (1 is a GB/s)."""

    rate: float = 48.0  # of every link
    segment: int = 32 << 10
    buffer: int = 4 << 20  # of the switch port before a server
    delay: float = 2_000.0  # one way
    service: float = 20_000.0  # message complete -> reply leaves
    timeout: float = 4_096.0 * 256  # 1.05 ms

    @property
    def budget(self) -> int:
        """What a server gives out: what the port's buffer holds, and what a link carries while a
        message is on its way, computed, and answered, which is not in the buffer."""
        return self.buffer + int(self.rate * (2 * self.delay + self.service))


@dataclass
class Flow:
    """One message: where its sender and its receiver are, in segments."""

    client: Client
    server: int
    num_bytes: int
    num_segments: int
    next_sent: int = 0
    expected: int = 0
    refused: int = -1  # the gap that the receiver has told about
    last_sent: float = 0.0
    on_done: Callable[[], None] = lambda: None


@dataclass
class Client:
    credit: int
    flows: collections.deque[Flow] = field(default_factory=collections.deque)
    sending: bool = False
    under_way: list[int] = field(default_factory=list)  # tokens of chunks not yet answered


class Simulation:
    """Clients and servers for a while of virtual time."""

    def __init__(
        self, num_clients: int, num_servers: int, paced: bool, network: Network, shape: SlotShape,
        share: float, seed: int,
    ):
        self.net, self.pace, self.share = network, Pace.of(shape), share
        self.random = random.Random(seed)
        self.now, self.order, self.events = 0.0, 0, []
        self.queued = [0] * num_servers  # bytes in each port's buffer
        self.free_at = [0.0] * num_servers
        self.good = self.carried = self.dropped = self.timeouts = 0
        wants = [self.pace.window_bytes] * num_clients
        parts = shares(network.budget, wants) if paced else [UNLIMITED] * num_clients
        self.clients = [Client(credit) for credit in parts]
        for client in self.clients:
            self.at(self.random.uniform(0, 1000), self.fill, client)

    def at(self, when: float, action: Callable[..., None], *arguments: object) -> None:
        self.order += 1
        heapq.heappush(self.events, (when, self.order, action, arguments))

    def run(self, until: float) -> None:
        while self.events and self.events[0][0] <= until:
            self.now, _, action, arguments = heapq.heappop(self.events)
            action(*arguments)

    def fill(self, client: Client) -> None:
        """As many chunks as the credit lets go, each a message to every server."""
        rows = self.pace.rows(client.credit)
        while len(client.under_way) < self.pace.num_slots and self.pace.may_send(
            client.credit, client.under_way, rows
        ):
            client.under_way.append(rows)
            left = [len(self.queued)]

            def answered(left: list[int] = left, rows: int = rows) -> None:
                left[0] -= 1
                if left[0] == 0:
                    client.under_way.remove(rows)
                    self.fill(client)

            for server in range(len(self.queued)):
                num_bytes = self.pace.message_bytes(max(1, round(rows * self.share)))
                client.flows.append(Flow(
                    client, server, num_bytes, -(-num_bytes // self.net.segment),
                    on_done=answered,
                ))
        if not client.sending:
            self.send(client)

    def send(self, client: Client) -> None:
        """One segment, of the messages in turn; then the next when the link is free."""
        client.sending = False
        for _ in range(len(client.flows)):
            flow = client.flows[0]
            client.flows.rotate(-1)
            if flow.next_sent < flow.num_segments:
                break
        else:
            return
        idx, flow.next_sent, flow.last_sent = flow.next_sent, flow.next_sent + 1, self.now
        size = min(self.net.segment, flow.num_bytes - idx * self.net.segment)
        client.sending = True
        self.at(self.now + size / self.net.rate, self.send, client)
        self.at(self.now + size / self.net.rate + self.net.delay, self.arrive, flow, idx, size)
        if flow.next_sent == flow.num_segments:
            self.at(self.now + self.net.timeout, self.time_out, flow)

    def arrive(self, flow: Flow, idx: int, size: int) -> None:
        s = flow.server
        if self.queued[s] + size > self.net.buffer:
            self.dropped += 1
            return
        self.queued[s] += size
        self.free_at[s] = max(self.free_at[s], self.now) + size / self.net.rate
        self.at(self.free_at[s], self.receive, flow, idx, size)

    def receive(self, flow: Flow, idx: int, size: int) -> None:
        self.queued[flow.server] -= size
        self.carried += size
        if idx > flow.expected and flow.refused != flow.expected:
            flow.refused = flow.expected
            self.at(self.now + self.net.delay, self.go_back, flow, flow.expected)
        if idx != flow.expected:
            return
        flow.expected, self.good = flow.expected + 1, self.good + size
        if flow.expected == flow.num_segments:
            self.at(self.now + self.net.service + self.net.delay, self.finish, flow)

    def go_back(self, flow: Flow, idx: int) -> None:
        flow.next_sent = min(flow.next_sent, max(idx, flow.expected))
        if not flow.client.sending:
            self.send(flow.client)

    def time_out(self, flow: Flow) -> None:
        late = self.now - flow.last_sent >= self.net.timeout
        if flow.expected < flow.num_segments and flow.next_sent == flow.num_segments and late:
            self.timeouts += 1
            flow.refused = -1
            self.go_back(flow, flow.expected)

    def finish(self, flow: Flow) -> None:
        flow.client.flows.remove(flow)
        flow.on_done()


def measure(
    num_clients: int, num_servers: int, paced: bool, *, network: Network | None = None,
    milliseconds: float = 12.0, max_rows: int = 256, seed: int = 0,
) -> dict:
    """One case: goodput per server in GB/s and what became of the segments.

    Of a batch's tokens two thirds have an expert at a server: 1 - (7/8)^8, top-8 over 8 servers.
    """
    network = network or Network()
    shape = SlotShape(
        num_slots=2, max_rows=max_rows, experts_per_row=8, hidden_size=7168, element_bytes=2,
        fp8=False, reply_mode=1, reply_element_bytes=2,
    )
    simulation = Simulation(num_clients, num_servers, paced, network, shape, 2 / 3, seed)
    simulation.run(WARM_UP_MS * 1e6)
    simulation.good = simulation.carried = simulation.dropped = simulation.timeouts = 0
    simulation.run((WARM_UP_MS + milliseconds) * 1e6)
    per_server = milliseconds * 1e6 * num_servers
    return {
        "clients": num_clients, "servers": num_servers, "paced": paced,
        "goodput_gb_per_s": round(simulation.good / per_server, 2),
        "carried_gb_per_s": round(simulation.carried / per_server, 2),
        "rows_per_message": simulation.pace.rows(simulation.clients[0].credit),
        "dropped_segments": simulation.dropped, "timeouts": simulation.timeouts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--milliseconds", type=float, default=12.0, help="of virtual time")
    parser.add_argument("--buffer-kb", type=int, default=4096, help="of a switch port")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    network = Network(buffer=options.buffer_kb << 10)
    rows = [
        measure(clients, servers, paced, network=network, milliseconds=options.milliseconds,
                seed=options.seed)
        for clients, servers in RATIOS for paced in (False, True)
    ]
    print(f"link {network.rate:.0f} GB/s, port buffer {network.buffer >> 10} KiB, budget "
          f"{network.budget >> 10} KiB; GB/s per server")
    print("clients:servers  paced  goodput  carried  rows/message  dropped  timeouts")
    for row in rows:
        print(f"{row['clients']:>7}:{row['servers']:<7}  {'yes' if row['paced'] else 'no':<5}"
              f"  {row['goodput_gb_per_s']:>7.1f}  {row['carried_gb_per_s']:>7.1f}"
              f"  {row['rows_per_message']:>12}  {row['dropped_segments']:>7}"
              f"  {row['timeouts']:>8}")
    print(json.dumps({"network": vars(network), "cases": rows}))


if __name__ == "__main__":
    main()
