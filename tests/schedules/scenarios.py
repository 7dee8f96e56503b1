"""Programs over the device code's posting paths, each run in the interleaving of a seed.

A scenario builds its queues, launches, and asserts what must hold whatever ran when. Blocks are
one warp each, so nothing is visible from one to another without a fence.
"""

from __future__ import annotations

import ctypes
import random
import struct

from expertwire.device_structs import (
    SIGNAL_WRITE,
    SIGNAL_WRITE_IMM,
    ClientPutArgs,
    ClientServer,
    KernelStatus,
    MessageShape,
    RouteTables,
)
from expertwire.launch import Launch, hca_array
from tests.conformance.rig import DeviceRig
from tests.queue_pair import ADD8, AWAIT, COPY, FILL, GET, PUT, PUT_ALWAYS_POST, QUIET
from tests.schedules import rounds
from tests.schedules.watch import Watch, advance

TIMEOUT_NS = 20_000_000  # of the virtual clock
DEPTH, CHUNK, SLOT, NUM_BYTES = 16, 64, 256, 160  # a put of 160 bytes is three entries
COUNTER, AREA = 60_000, 32_768


def word(warp: int, turn: int) -> int:
    return 0x0101010101010101 * (16 * (warp + 1) + turn + 1)


def shared_queue(seed: int) -> None:
    """Blocks share one queue: sources are refilled after quiet, the last put rings by itself."""
    choose = random.Random(seed)
    blocks, warp_size, mode = choose.choice([2, 3, 4]), choose.choice([1, 2, 4]), seed // 2 % 3
    with DeviceRig(DEPTH, chunk_bytes=CHUNK, doorbell_mode=mode, timeout_ns=TIMEOUT_NS) as rig:
        if seed % 2:
            advance(rig, 65536 - 16 * choose.choice([1, 2]))
        rig.fill_remote(0, b"\xee" * AREA)
        watch = Watch(rig)

        def place(warp, turn):
            return SLOT * (4 * warp + turn)

        def program(warp):
            source = SLOT * warp
            for turn in range(3):
                yield dict(op=FILL, local_addr=rig.local.addr + source, num_bytes=NUM_BYTES,
                           value=word(warp, turn))
                yield rig.operation(PUT, place(warp, turn), source, num_bytes=NUM_BYTES,
                                    message_idx=turn)
                yield dict(op=QUIET)
            yield rig.operation(ADD8, COUNTER, value=warp + 1)
            source += AREA
            yield dict(op=FILL, local_addr=rig.local.addr + source, num_bytes=NUM_BYTES,
                       value=word(warp, 3))
            yield rig.operation(PUT_ALWAYS_POST, place(warp, 3), source, num_bytes=NUM_BYTES)

        statuses = rig.launch([list(program(w)) for w in range(blocks)], blocks=blocks,
                              warp_size=warp_size, seed=seed)
        codes = [(s.code, s.stage, s.syndrome) for s in statuses]
        assert codes == [(0, 0, 0)] * blocks, f"statuses {codes}"
        watch.finish()
        for warp in range(blocks):
            for turn in range(4):
                got = rig.at_remote(place(warp, turn), SLOT)
                want = word(warp, turn).to_bytes(8, "little") * (NUM_BYTES // 8)
                assert got == want.ljust(SLOT, b"\xee"), f"put {turn} of warp {warp}"
        (total,) = struct.unpack("<Q", rig.at_remote(COUNTER, 8))
        assert total == sum(range(blocks + 1))


def full_ring(seed: int) -> None:
    """Many more entries than slots, every put rings, nobody waits for completions in between."""
    choose = random.Random(seed)
    blocks, warp_size, puts = choose.choice([3, 4]), choose.choice([1, 2]), 8
    with DeviceRig(DEPTH, chunk_bytes=CHUNK, timeout_ns=TIMEOUT_NS) as rig:
        if seed % 2:
            advance(rig, 65536 - 16 * choose.choice([1, 2, 3]))
        payload = choose.randbytes(NUM_BYTES)
        rig.fill(0, payload)
        watch = Watch(rig)
        sizes = [choose.choices([8, 40, 100, NUM_BYTES], k=puts) for _ in range(blocks)]
        statuses = rig.launch([
            [rig.operation(PUT_ALWAYS_POST, SLOT * (puts * w + i), num_bytes=n)
             for i, n in enumerate(row)] for w, row in enumerate(sizes)
        ], blocks=blocks, warp_size=warp_size, seed=seed)
        codes = [(s.code, s.stage, s.syndrome) for s in statuses]
        assert codes == [(0, 0, 0)] * blocks, f"statuses {codes}"
        watch.finish()
        for w, row in enumerate(sizes):
            for i, n in enumerate(row):
                got = rig.at_remote(SLOT * (puts * w + i), SLOT)
                assert got == payload[:n].ljust(SLOT, b"\0"), f"put {i} of warp {w}"


def read_back(seed: int) -> None:
    """What quiet promises for reads: the bytes are here."""
    choose = random.Random(seed)
    blocks, warp_size = choose.choice([1, 2, 3]), choose.choice([1, 4])
    with DeviceRig(DEPTH, timeout_ns=TIMEOUT_NS) as rig:
        rig.fill_remote(0, bytes(range(1, 241)))

        def program(warp):
            target, log = SLOT * warp, AREA + 1024 * warp
            for turn in range(4):
                yield dict(op=FILL, local_addr=rig.local.addr + target, num_bytes=48, value=0)
                yield rig.operation(GET, 48 * turn, target, num_bytes=48)
                yield dict(op=QUIET)
                yield dict(op=COPY, remote_addr=rig.local.addr + target, num_bytes=48,
                           local_addr=rig.local.addr + log + 48 * turn)

        statuses = rig.launch([list(program(w)) for w in range(blocks)], blocks=blocks,
                              warp_size=warp_size, seed=seed,
                              watched=[(rig.local.addr, SLOT * blocks)])
        assert [s.code for s in statuses] == [0] * blocks
        for warp in range(blocks):
            assert rig.at_local(AREA + 1024 * warp, 192) == bytes(range(1, 193))


def errors(seed: int) -> None:
    """An entry fails: whoever is told success has its bytes over there, all others the syndrome."""
    choose = random.Random(seed)
    blocks, warp_size = choose.choice([2, 3]), choose.choice([1, 4])
    with DeviceRig(DEPTH, chunk_bytes=CHUNK, timeout_ns=TIMEOUT_NS) as rig:
        Watch(rig, fail_at=choose.randrange(2 * blocks))
        rig.fill(0, b"\x77" * NUM_BYTES)
        programs = [
            [rig.operation(PUT_ALWAYS_POST, SLOT * w, num_bytes=NUM_BYTES), dict(op=QUIET)]
            for w in range(blocks)
        ]
        statuses = rig.launch(programs, blocks=blocks, warp_size=warp_size, seed=seed)
        rig.here.set_hook(None)
        for warp, status in enumerate(statuses):
            if status.code == 0:
                assert rig.at_remote(SLOT * warp, NUM_BYTES) == b"\x77" * NUM_BYTES
            else:
                assert (status.code, status.syndrome in (0x13, 0x05)) == (2, True), status.code
        assert any(s.code for s in statuses)


def completions(seed: int) -> None:
    """Whoever sees the last words of a completion sees all of it, read word by word afterwards."""
    choose = random.Random(seed)
    readers, puts = choose.choice([1, 2]), choose.randint(2, 5)
    last, fails = puts - 1, choose.random() < 0.5
    with DeviceRig(DEPTH, timeout_ns=TIMEOUT_NS) as rig:
        Watch(rig, fail_at=last if fails else None)
        cq, qpn = rig.qp.info.cq_addr, rig.qp.info.qpn
        want = struct.pack(
            ">32xI8xI4x3xBIHBB", qpn, 0 if fails else 8 * puts, 0x13 if fails else 0, 8 << 24 | qpn,
            last, 0, 13 << 4 if fails else 0)
        poster = [rig.operation(PUT_ALWAYS_POST, num_bytes=8 * (i + 1)) for i in range(puts)]
        reader = [dict(op=AWAIT, local_addr=cq + 56, value=int.from_bytes(want[56:], "little"))]
        reader += [dict(op=COPY, remote_addr=cq, num_bytes=64)] * (puts - 1)
        programs = [poster, *([dict(op) for op in reader] for _ in range(readers))]
        logs = []
        for program in programs[1:]:
            for operation in program[1:]:
                operation["local_addr"] = rig.local.addr + AREA + 64 * len(logs)
                logs.append(AREA + 64 * len(logs))
        statuses = rig.launch(programs, blocks=1 + readers, warp_size=choose.choice([1, 4]),
                              seed=seed)
        rig.here.set_hook(None)
        assert [s.code for s in statuses] == [0] * (1 + readers)
        for log in logs:
            got = rig.at_local(log, 64)
            assert got == want, f"completion {got.hex(' ', 4)}, not {want.hex(' ', 4)}"


def _message(seed: int, *, direct: bool) -> None:
    """Messages to three servers; on the other side somebody waits for each flag and then reads."""
    choose = random.Random(seed)
    servers, top_k, hidden, slot = 3, 2, 32, 1024
    rows = [choose.choice([1, 2, 4]) for _ in range(servers)]
    mode, seq = (SIGNAL_WRITE if direct else seed % 3), 7
    with DeviceRig(DEPTH, num_device_qps=2, chunk_bytes=None if direct else CHUNK,
                   timeout_ns=TIMEOUT_NS) as rig:
        lengths = [128 + 2 * -(-r * top_k * 4 // 16) * 16 + r * hidden * 2 for r in rows]
        if direct:
            rig.remote_keys[0].mapped = rig.peer.map(rig.rkey, rig.remote.addr, 4096)
        table = (ClientServer * servers)()
        for s, server in enumerate(table):
            rig.fill(slot * s, choose.randbytes(lengths[s]))
            rig.fill(slot * (s + 1) - 16, struct.pack("<QQ", seq, 0))
            server.send_addr = rig.local.addr + slot * s
            server.remote_addr = rig.remote.addr + slot * s
            server.request_slot_bytes, server.peer = slot, ctypes.addressof(rig.device_peer)
            server.slot_idx = s
        batch, missing = (ctypes.c_uint32 * servers)(*rows), ctypes.c_int32(-1)
        status = KernelStatus()
        put = ClientPutArgs(
            servers=ctypes.addressof(table),
            tables=RouteTables(batch_size=ctypes.addressof(batch), num_servers=servers),
            shape=MessageShape(hidden_size=hidden, data_type=2, experts_per_row=top_k, seq=seq),
            status=ctypes.addressof(status), missing_expert=ctypes.addressof(missing),
            max_loaded_servers=servers, signal_mode=mode,
        )
        if mode == SIGNAL_WRITE_IMM:
            rig.window.watch(rig.remote.addr, slot, servers)
        log = rig.there.alloc(servers * slot)
        readers, reader_status = rig.run_args([
            [dict(op=AWAIT, local_addr=rig.remote.addr + slot * (s + 1) - 16, value=seq),
             dict(op=COPY, remote_addr=rig.remote.addr + slot * s, local_addr=log.addr + slot * s,
                  num_bytes=lengths[s])] for s in range(servers)
        ])
        kernel = "client_put_direct" if direct else "client_put_ibgda"
        launch = Launch([(kernel, put), ("ibgda_run", readers)], grid=servers,
                        warp_size=choose.choice([1, 4]))
        launch.run_seeded(seed, hca_array(rig.here.pointer, rig.there.pointer),
                          rig.watched((rig.remote.addr, slot * servers)))
        codes = [status.code, *(s.code for s in reader_status)]
        got = [ctypes.string_at(log.addr + slot * s, lengths[s]) for s in range(servers)]
        log.close()
        assert codes == [0] * 4, f"statuses {codes}"
        for s in range(servers):
            assert got[s] == rig.at_local(slot * s, lengths[s]), f"message of server {s}"


def message(seed: int) -> None:
    """Payload, head and flag through the queue; flag by write, masked fetch-add or immediate."""
    _message(seed, direct=False)


def message_direct(seed: int) -> None:
    """Payload, head and flag stored straight into the mapped slot."""
    _message(seed, direct=True)


SCENARIOS = {
    f.__name__: f
    for f in (shared_queue, full_ring, read_back, errors, completions, message, message_direct)
} | rounds.SCENARIOS
