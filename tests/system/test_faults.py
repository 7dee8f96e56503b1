"""Bad input and faults: a clear error, nothing lost, others go on, nothing left behind."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
import time
import types

import pytest
import torch
from tests.system.cluster import (
    TOKEN,
    ScaledExperts,
    batch,
    cluster,
    expected,
    model_facts,
    wait_until,
)

from expertwire import Client, Registry, Server
from expertwire.chaos import replies
from expertwire.chaos.network import RETRY_EXCEEDED
from expertwire.client import collect, trip
from expertwire.client.routing import RoutingTable
from expertwire.device_structs import BufferHead, ReplyHead
from expertwire.errors import (
    AuthError,
    ConfigError,
    ExpertwireError,
    NoServerError,
    RejectedError,
)
from expertwire.message import FLAG_BYTES, Reason, RequestLayout, head_checksum

MODEL = model_facts(num_experts=6, hidden_size=16, top_k=2)
SHARES = [[0, 1, 2], [3, 4, 5]]


class RawRequest:
    """Writes requests byte by byte into a server's slot, as a broken client would."""

    def __init__(self, client: Client, server_idx: int = 0):
        self.client = client
        self.link = client.links.table.links[server_idx]
        self.seq = 1000
        shape, end = self.link.shape, self.link.endpoint
        self.slot = end.peer.map(end.remote.rkey, end.remote.addr, end.remote.num_bytes)
        self.flag = self.slot + shape.request_slot_bytes - FLAG_BYTES
        self.reply_flag = end.recv.addr + shape.reply_slot_bytes - FLAG_BYTES

    def head(self, **fields) -> BufferHead:
        """A head that the server accepts, then the given fields changed, then the checksum."""
        self.seq += 1
        layout = RequestLayout.of(1, 2, 16 * 4)
        head = BufferHead(
            magic=0x51525745, version=1, head_bytes=128, seq=self.seq, epoch=1,
            client_id=self.client.client_id, layer=0, hidden_size=16, data_type=1, num_rows=1,
            experts_per_row=2, num_experts=6, reply_mode=1, reply_type=1,
            active_bytes=layout.hidden_offset - layout.active_offset,
            payload_bytes=layout.end - layout.hidden_offset, padding_bytes=8 + 8,
        )
        for name, value in fields.items():
            setattr(head, name, value)
        head.head_checksum = fields.get("head_checksum", head_checksum(head))
        return head

    def send(self, head: BufferHead, ids=(0, 1)) -> ReplyHead:
        """Writes head, ids and zero rows, raises the flag, and returns the reply's head."""
        # Up to the flag: a flag of 0 in between would be one more message, and refused.
        ctypes.memset(self.slot + 128, 0, self.flag - self.slot - 128)
        ctypes.memmove(self.slot, ctypes.addressof(head), 128)
        (ctypes.c_int32 * 2).from_address(self.slot + 128)[:] = ids
        ctypes.c_uint64.from_address(self.flag).value = self.seq
        self.link.endpoint.notify()
        deadline = time.monotonic() + 5
        while ctypes.c_uint64.from_address(self.reply_flag).value != self.seq:
            assert time.monotonic() < deadline, "the server did not answer"
            time.sleep(0.0005)
        raw = ReplyHead.from_address(self.reply_flag - ctypes.sizeof(ReplyHead))
        return ReplyHead.from_buffer_copy(raw)


DAMAGES = [
    (dict(magic=0), Reason.MAGIC),
    (dict(head_bytes=64), Reason.MAGIC),
    (dict(version=2), Reason.VERSION),
    (dict(head_checksum=1), Reason.CHECKSUM),
    (dict(seq=5), Reason.SEQ),
    (dict(client_id=1), Reason.CLIENT),
    (dict(layer=2), Reason.LAYER),
    (dict(layer=2**32 - 1), Reason.LAYER),
    (dict(hidden_size=17), Reason.HIDDEN_SIZE),
    (dict(data_type=2), Reason.DATA_TYPE),
    (dict(data_type=99), Reason.DATA_TYPE),
    (dict(data_type=4), Reason.SCALE),
    (dict(scale_block=128), Reason.SCALE),
    (dict(scale_type=1), Reason.SCALE),
    (dict(num_rows=0), Reason.ROWS),
    (dict(num_rows=2**32 - 1), Reason.ROWS),
    (dict(experts_per_row=0), Reason.EXPERTS_PER_ROW),
    (dict(experts_per_row=2**31), Reason.EXPERTS_PER_ROW),
    (dict(num_experts=7), Reason.NUM_EXPERTS),
    (dict(reply_mode=2), Reason.REPLY),
    (dict(reply_type=3), Reason.REPLY),
    (dict(active_bytes=8), Reason.BYTES),
    (dict(payload_bytes=2**63), Reason.BYTES),
    (dict(padding_bytes=1), Reason.BYTES),
    (dict(num_rows=3), Reason.BYTES),
]


def test_every_damaged_field_gets_its_reason_and_the_server_goes_on():
    with cluster(SHARES, MODEL, max_rows=8) as (client, servers, registry), Client(
        registry, token=TOKEN
    ) as other:
        other.wait_ready()
        raw = RawRequest(client)
        assert raw.send(raw.head()).reason == Reason.OK
        inputs = batch(9, MODEL)
        for change, reason in DAMAGES:
            reply = raw.send(raw.head(**change))
            assert (Reason(reply.reason), reply.num_rows) == (reason, 0), change
            torch.testing.assert_close(other.moe(0, *inputs), expected(*inputs, MODEL))
        for ids in ((3, 0), (6, 0), (2**31 - 1, 0), (-2, 0), (-(2**31), 1)):
            assert raw.send(raw.head(), ids).reason == Reason.NOT_HELD, ids
        assert raw.send(raw.head(), (-1, 2)).reason == Reason.OK
        wait_until(lambda: servers[0].batcher.counts["refused"] == len(DAMAGES) + 5)


def test_every_single_bit_of_the_head_matters_or_is_caught():
    """Flip each bit of an accepted head: the checksum (or an earlier check) refuses it."""
    with cluster(SHARES, MODEL, max_rows=8) as (client, _, _):
        raw = RawRequest(client)
        for bit in range(128 * 8):
            head = raw.head()
            bytes_ = (ctypes.c_uint8 * 128).from_buffer(head)
            bytes_[bit // 8] ^= 1 << bit % 8
            assert raw.send(head).reason != Reason.OK, f"bit {bit}"


def test_failing_experts_are_reported_and_forgotten():
    with cluster(SHARES, MODEL) as (client, servers, _):
        servers[0].shard.fail_on_layer = 1
        inputs = batch(6, MODEL)
        with pytest.raises(RejectedError, match="experts failed") as caught:
            client.moe(1, *inputs)
        assert caught.value.reason == Reason.EXPERT_FAULT and caught.value.server == "s0"
        torch.testing.assert_close(client.moe(0, *inputs), expected(*inputs, MODEL))


def test_stale_routing_is_refused_and_the_batch_goes_elsewhere():
    with cluster(SHARES, MODEL) as (client, _, _):
        table = client.links.table
        table.links[0].experts = list(range(6))
        table.links[1].experts = []
        client.links.table = RoutingTable(table.epoch, 6, table.links)
        inputs = batch(6, MODEL)
        torch.testing.assert_close(client.moe(0, *inputs), expected(*inputs, MODEL))
        assert client.num_retries > 0, "the server refused what it does not hold"


def test_server_that_leaves_in_mid_flight_is_replaced_by_its_replica():
    """The batch is sent again to whoever holds the experts; the sum counts everything once."""
    with cluster([[0, 1, 2], [3, 4, 5], [0, 1, 2, 3, 4, 5]], MODEL) as (client, servers, _):
        inputs = batch(30, MODEL)
        want = expected(*inputs, MODEL)
        torch.testing.assert_close(client.moe(0, *inputs), want)
        stop = threading.Timer(0.05, servers[0].close)
        stop.start()
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            torch.testing.assert_close(client.moe(0, *inputs), want)
        stop.join()
        assert len(client.links.table.links) == 2


def test_no_replica_is_a_named_error_within_the_deadline():
    with cluster(SHARES, MODEL, connect_timeout=0.5) as (client, servers, _):
        inputs = batch(8, MODEL)
        client.moe(0, *inputs)
        servers[1].close()
        time.sleep(0.1)
        start = time.monotonic()
        with pytest.raises(NoServerError, match="layer 0: no reachable server holds expert"):
            client.moe(0, *inputs)
        assert time.monotonic() - start < 3
        ids = inputs[1] % 3
        torch.testing.assert_close(
            client.moe(0, inputs[0], ids, inputs[2]),
            expected(inputs[0], ids, inputs[2], MODEL),
        )


def test_a_new_server_takes_over_without_a_restart():
    with cluster(SHARES, MODEL, connect_timeout=5) as (client, servers, registry):
        inputs = batch(8, MODEL)
        client.moe(0, *inputs)
        servers[1].close()
        with Server(ScaledExperts([3, 4, 5]), MODEL, registry, token=TOKEN, name="fresh"):
            torch.testing.assert_close(client.moe(1, *inputs), expected(*inputs, MODEL, 1))


def test_stalled_server_is_routed_around_after_the_reply_timeout():
    shares = [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
    with cluster(shares, MODEL, reply_timeout=0.4) as (client, servers, registry):
        inputs = batch(12, MODEL)
        client.moe(0, *inputs)
        epoch, release = registry.epoch, threading.Event()
        servers[0].shard.run = lambda *args: release.wait(60) and None
        try:
            torch.testing.assert_close(client.moe(0, *inputs), expected(*inputs, MODEL))
            assert client.num_retries == 1
            time.sleep(3 * 0.4)
            assert "s0" in registry.members and registry.epoch == epoch, "slow is not dead"
        finally:
            release.set()


def test_a_server_that_takes_connections_and_never_answers_costs_one_deadline_each_time():
    """Its replica is there: the doubled deadlines of a server that has none are not for it."""
    with cluster([range(6), range(6)], MODEL) as (client, servers, _):
        inputs = batch(12, MODEL)
        for _ in range(40):
            client.moe(0, *inputs)
        deadline, longest = client.stats()["servers"]["s0"]["deadline_ms"] / 1e3, 0.0
        hang = {"way": "replies", "hang": ["s0"]}
        replies.obey(servers[0].hca, {"network": hang, "seed": 1, "server": "s0"})
        end = time.monotonic() + 60
        while client.links.num_lost < 3:
            start = time.monotonic()
            assert start < end
            torch.testing.assert_close(client.moe(0, *inputs), expected(*inputs, MODEL))
            longest = max(longest, time.monotonic() - start)
        replies.obey(servers[0].hca, {"network": None})
        assert longest < 3 * deadline, "the third would be four"


def test_a_lost_reply_is_told_by_its_server_and_costs_no_deadline():
    """The server sees the error completion, and closes the connection of whoever waits."""
    with cluster([range(6), range(6)], MODEL, reply_timeout=60) as (client, servers, _):
        inputs = batch(12, MODEL)
        client.moe(0, *inputs)
        cut = {"way": "replies", "cut": ["s0"]}
        replies.obey(servers[0].hca, {"network": cut, "seed": 1, "server": "s0"})
        start = time.monotonic()
        while client.num_retries == 0:
            torch.testing.assert_close(client.moe(0, *inputs), expected(*inputs, MODEL))
            assert time.monotonic() - start < 20
        replies.obey(servers[0].hca, {"network": None})
        assert servers[0].batcher.errors == {"0x15": client.links.num_lost}


def test_a_connection_that_breaks_before_it_is_watched_ends_no_watching():
    with cluster([range(6)], MODEL) as (client, (server,), registry):
        client.moe(0, *batch(5, MODEL))
        link = server._clients[0]
        closed = types.SimpleNamespace(channel=types.SimpleNamespace(fileno=lambda: -1))
        server._to_watch.extend([closed, link])
        server._wake_watch()
        with Client(registry, token=TOKEN) as other:
            other.moe(0, *batch(5, MODEL))
            assert server.num_clients == 2
        end = time.monotonic() + 20
        while server.num_clients == 2:
            assert time.monotonic() < end, "nobody noticed that the client has gone"
            time.sleep(0.01)


def test_an_error_completion_wakes_the_client_that_waits(monkeypatch):
    """It does not wait for the end of its slice."""
    for module in (collect, trip):
        monkeypatch.setattr(module, "SLICE_NS", 60_000_000_000)
    with cluster([range(6), range(6)], MODEL, reply_timeout=120) as (client, _, _):
        inputs = batch(12, MODEL)
        client.moe(0, *inputs)
        start = time.monotonic()
        queues = {s.qpn for link in client.links.table.links if link.server_id == "s0"
                  for s in link.endpoint.qp_states}
        client.hca.set_hook(lambda _c, qpn, *_: RETRY_EXCEEDED if qpn in queues else 0)
        while client.num_retries == 0:
            torch.testing.assert_close(client.moe(0, *inputs), expected(*inputs, MODEL))
        assert time.monotonic() - start < 30
        assert client.errors == {"0x15": 1}


def test_two_models_do_not_mix():
    with cluster(SHARES, MODEL) as (_, _, registry):
        other = model_facts(num_experts=6, hidden_size=32, name="another")
        with Server(ScaledExperts([0]), other, registry, token=TOKEN) as server, pytest.raises(
            ConfigError, match=r"scaled.*another|another.*scaled"
        ):
            server.wait_registered(3)


def test_wrong_token_is_named():
    with Registry(token=TOKEN) as registry:
        with Client(registry, token=b"z" * 32, connect_timeout=1) as client, pytest.raises(
            ExpertwireError
        ):
            client.wait_ready()
        with Server(
            ScaledExperts([0]), MODEL, registry, token=b"z" * 32
        ) as server, pytest.raises(AuthError, match="token"):
            server.wait_registered(3)


def test_servers_and_clients_start_in_any_order():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(Client(address, token=TOKEN, connect_timeout=10))
        stack.enter_context(Server(ScaledExperts([3, 4, 5]), MODEL, address, token=TOKEN))
        stack.enter_context(Registry(address, token=TOKEN))
        stack.enter_context(Server(ScaledExperts([0, 1, 2]), MODEL, address, token=TOKEN))
        client.wait_ready(10)
        inputs = batch(7, MODEL)
        torch.testing.assert_close(client.moe(0, *inputs), expected(*inputs, MODEL))


def resources() -> tuple[int, int, int]:
    """(file descriptors, threads, memfd mappings) of this process."""
    with open("/proc/self/maps") as maps:
        mappings = sum("memfd:expertwire" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), threading.active_count(), mappings


def test_opening_and_closing_leaves_nothing_behind():
    def round_trip():
        with cluster(SHARES, MODEL) as (client, _, _):
            client.moe(0, *batch(5, MODEL))

    round_trip()
    gc.collect()
    before = resources()
    for _ in range(8):
        round_trip()
    gc.collect()
    deadline = time.monotonic() + 3
    while resources() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    fds, threads, mappings = resources()
    assert fds <= before[0] and threads <= before[1] and mappings <= before[2]


def test_clients_that_come_and_go_leave_nothing_at_the_server():
    with cluster(SHARES, MODEL) as (client, servers, registry):
        inputs = batch(5, MODEL)
        client.moe(0, *inputs)
        before = resources()
        for _ in range(10):
            with Client(registry, token=TOKEN) as visitor:
                visitor.moe(0, *inputs)
        deadline = time.monotonic() + 3
        while len(servers[0]._clients) > 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.2)
        gc.collect()
        after = resources()
        assert after[0] <= before[0] and after[2] <= before[2]
        torch.testing.assert_close(client.moe(0, *inputs), expected(*inputs, MODEL))
