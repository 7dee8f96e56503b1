"""Programs over the kernels of clients and servers, each run in the interleaving of a seed."""

from __future__ import annotations

import random

from expertwire.device_structs import (
    ClientCombineArgs,
    ClientFailoverArgs,
    ClientPackArgs,
    ClientPutArgs,
    ClientSendArgs,
    IbgdaOperation,
    IbgdaPeer,
    IbgdaRunArgs,
    KernelStatus,
    ServerEchoArgs,
    ServerReplyArgs,
)
from expertwire.launch import Launch, hca_array
from expertwire.message import ReplyMode
from tests.queue_pair import FILL
from tests.schedules.pairs import (
    EXPERTS,
    TIMEOUT_NS,
    ClientRoundsArgs,
    Pairs,
    Round,
    ServerSide,
    addr,
)

IBGDA, DIRECT, LATER = range(3)


def _check(pairs: Pairs, statuses, sides, rounds, num_messages: int) -> None:
    codes = [(s.code, s.stage, s.peer, s.expected, s.seen) for s in statuses]
    assert not any(code[0] for code in codes), f"statuses of clients {codes}"
    pairs.no_errors()
    held = {s: side.held for s, side in enumerate(sides)}
    for side in sides:
        side.check(num_messages)
    for (client, turn), batch in rounds.items():
        batch.check(held, f"client {client}, round {turn}")


def _rounds(seed: int, *, do_ibgda: bool) -> None:
    """Two clients, two servers, rounds in the same slots: pack, put, poll, reply, combine."""
    choose = random.Random(seed)
    num_clients, num_servers, turns = 2, 2, 3
    mode = seed % 3 if do_ibgda else 0
    in_place = not do_ibgda and choose.random() < 0.5
    with Pairs(choose, num_clients, num_servers, signal_mode=mode, in_place=in_place) as pairs:
        statuses = (KernelStatus * num_clients)()
        rounds = {(c, t): Round(pairs, choose, c, t + 1, statuses[c])
                  for c in range(num_clients) for t in range(turns)}
        way, num_messages = IBGDA if do_ibgda else DIRECT, num_clients * turns
        sides = [ServerSide(pairs, s, num_clients, num_messages, way) for s in range(num_servers)]
        steps = [("check_server_rounds", side.args) for side in sides]
        for c in range(num_clients):
            of = [rounds[c, t] for t in range(turns)]
            lists = ((ClientPackArgs * turns)(*[r.pack for r in of]),
                     (ClientPutArgs * turns)(*[r.put for r in of]),
                     (ClientCombineArgs * turns)(*[r.combine for r in of]))
            pairs.keep.append(lists)
            steps.append(("check_client_rounds", ClientRoundsArgs(
                *map(addr, lists), num_rounds=turns, do_ibgda=do_ibgda)))
        launch = Launch(steps, warps=choose.choice([1, 2]), warp_size=choose.choice([1, 2]))
        launch.run_seeded(seed, hca_array(*[hca.pointer for hca in pairs.hcas]), pairs.watched())
        _check(pairs, statuses, sides, rounds, num_messages)


def rounds(seed: int) -> None:
    """Through work queues, signalled by write, masked fetch-add or immediate."""
    _rounds(seed, do_ibgda=True)


def rounds_direct(seed: int) -> None:
    """Stored into the peer's memory, by a copy or in place."""
    _rounds(seed, do_ibgda=False)


def _send(batch: Round, pairs: Pairs, only_if: int = 0) -> ClientSendArgs:
    pack = ClientPackArgs.from_buffer_copy(batch.pack)
    pack.tables = batch.route.tables
    return ClientSendArgs(route=batch.route, pack=pack, arrived=addr(pairs.new(1)),
                          counts=addr(pairs.new(64)), only_if=only_if)


def grids(seed: int) -> None:
    """Kernels of many blocks: client_send_direct beside the server, server_reply_in_place beside
    client_combine; rounds in the same slots."""
    choose = random.Random(seed)
    num_servers, turns = 2, 2
    shape = dict(warps=choose.choice([1, 2]), warp_size=choose.choice([1, 2]))
    with Pairs(choose, 1, num_servers, in_place=True) as pairs:
        statuses = (KernelStatus * 1)()
        rounds = {(0, t): Round(pairs, choose, 0, t + 1, statuses[0]) for t in range(turns)}
        sides = [ServerSide(pairs, s, 1, 1, LATER) for s in range(num_servers)]
        for batch in rounds.values():
            Launch(
                [("client_send_direct", _send(batch, pairs)),
                 *[("check_server_rounds", side.args) for side in sides]],
                grid=[choose.randint(1, 4)] + [1] * num_servers, **shape,
            ).run_seeded(seed, watched=pairs.watched())
            Launch(
                [("client_combine", batch.combine),
                 *[("server_reply_in_place", side.reply) for side in sides]],
                grid=[choose.randint(1, 3) for _ in range(1 + num_servers)], **shape,
            ).run_seeded(seed + 1, watched=pairs.watched())
        _check(pairs, statuses, sides, rounds, 1)


def echo(seed: int) -> None:
    """client_send_direct of two clients beside server_echo_in_place, all of many blocks; what the
    blocks did not all see the next launch answers."""
    choose = random.Random(seed)
    num_clients, num_servers, turns = 2, 2, 2
    shape = dict(warps=choose.choice([1, 2]), warp_size=choose.choice([1, 2]))
    with Pairs(choose, num_clients, num_servers, in_place=True) as pairs:
        pairs.reply_mode = ReplyMode.SUM
        statuses = (KernelStatus * num_clients)()
        echoes = []
        for s in range(num_servers):
            side = ServerSide(pairs, s, num_clients, 1, LATER)
            reply = ServerReplyArgs.from_buffer_copy(side.reply)
            reply.expert_output = 0
            echoes.append(ServerEchoArgs(poll=side.args.take.poll, reply=reply,
                                         seen=addr(pairs.new(num_clients))))
            pairs.keep.append(side)
        for turn in range(turns):
            batches = [Round(pairs, choose, c, turn + 1, statuses[c]) for c in range(num_clients)]
            sends = [("client_send_direct", _send(batch, pairs)) for batch in batches]
            combines = [("client_combine", batch.combine) for batch in batches]
            for first, timeout_ns in ((sends, TIMEOUT_NS), (combines, 1)):
                for args in echoes:
                    args.poll.timeout_ns = timeout_ns  # the second time all is there that can come
                steps = [*first, *(("server_echo_in_place", args) for args in echoes)]
                Launch(steps, grid=[choose.randint(1, 3) for _ in steps], **shape).run_seeded(
                    seed, watched=pairs.watched())
            assert not any(s.code for s in statuses), f"statuses {[s.code for s in statuses]}"
            for c, batch in enumerate(batches):
                for t, ids in enumerate(batch.ids):
                    want = batch.hidden[t] * len({e % num_servers for e in ids})
                    assert (batch.output[t] == want).all(), f"client {c}, token {t}, turn {turn}"


def failover(seed: int) -> None:
    """Two servers hold everything, one may be silent: it is lost, and the batch goes to the other
    one under the next seq, stored directly or through the queues. What answered is kept, whenever
    in the wait it did."""
    choose = random.Random(seed)
    in_place, mode = choose.random() < 0.5, choose.choice([0, 2])  # nobody added to flags before
    with Pairs(choose, 1, 2, signal_mode=0 if in_place else mode, in_place=in_place,
               replicas=[[0, 1]] * EXPERTS) as pairs:
        status = (KernelStatus * 1)()
        batch = Round(pairs, choose, 0, 7, status[0])
        loaded = [s for s in range(2) if batch.routing.rows[s]]
        silent = choose.choice([[], loaded[:1], loaded[-1:]])
        seq, resend = pairs.new(1, dtype="uint64", fill=7), pairs.new(1, dtype="int32")
        lost = pairs.new(2)
        wait = ClientCombineArgs.from_buffer_copy(batch.combine)
        wait.seq, wait.timeout_ns = addr(seq), TIMEOUT_NS // 100
        steps = [("client_failover", ClientFailoverArgs(
            wait=wait, expert_servers=addr(batch.expert_servers), lost=addr(lost),
            resend=addr(resend), num_experts=EXPERTS, max_replicas=2))]
        for s in loaded:
            if s not in silent:
                flag = batch.servers[s].reply_addr + pairs.shape.reply_slot_bytes - 16
                fill = (IbgdaOperation * 1)(IbgdaOperation(
                    op=FILL, local_addr=flag, num_bytes=8, value=7))
                peer, own = IbgdaPeer(), KernelStatus()
                pairs.keep += [fill, peer, own]
                steps.append(("ibgda_run", IbgdaRunArgs(
                    peer=addr(peer), operations=addr(fill), status=addr(own), num_operations=1)))
        Launch(steps, warps=1, warp_size=choose.choice([2, 4])).run_seeded(
            seed, watched=pairs.watched())
        gone = [s for s in range(2) if lost[s]]
        assert gone == silent, f"lost {gone}, silent {silent}"
        assert resend[0] == (-1 if silent else 0)
        for e in range(EXPERTS):
            kept = [s for s in (0, 1) if s not in silent]
            assert [s for s in batch.expert_servers[e] if s >= 0] == kept, f"servers of expert {e}"
        if not silent or len(loaded) < 2:
            return
        _resend(seed, choose, pairs, batch, kept[0], status, resend)


def _resend(seed, choose, pairs, batch, server, status, resend) -> None:
    """The same rows under the next seq to the replica that is left, which serves them once."""
    pairs.replicas = [[server]] * EXPERTS
    again = Round(pairs, choose, 0, 8, status[0], ids=batch.ids)
    again.hidden[:], again.weights[:] = batch.hidden, batch.weights
    side = ServerSide(pairs, server, 1, 1, DIRECT if pairs.in_place else IBGDA)
    again.route.expert_servers = addr(batch.expert_servers)
    again.pack.missing_expert = again.put.missing_expert = addr(resend)
    if pairs.in_place:
        steps = [("client_send_direct", _send(again, pairs, addr(resend))),
                 ("client_combine", again.combine)]
        grid = [1, choose.randint(1, 3), choose.randint(1, 2)]
    else:
        steps, grid = [("check_client_rounds", ClientRoundsArgs(
            addr(again.pack), addr(again.put), addr(again.combine), num_rounds=1, do_ibgda=1))], 1
    Launch(
        [("check_server_rounds", side.args), *steps], grid=grid, warps=choose.choice([1, 2]),
        warp_size=2,
    ).run_seeded(seed, hca_array(*[hca.pointer for hca in pairs.hcas]), pairs.watched())
    assert status[0].code == 0, f"status {status[0].code} at stage {status[0].stage}"
    side.check(1)
    again.check({server: side.held}, "the batch that was sent again")


SCENARIOS = {f.__name__: f for f in (rounds, rounds_direct, grids, echo, failover)}
