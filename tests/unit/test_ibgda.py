"""ibgda_device.cuh byte by byte, with no HCA: WQEs, doorbells, back-pressure, completions."""

from __future__ import annotations

import pytest
from tests.queue_pair import (
    ADD4,
    ADD8,
    GET,
    INLINE,
    PUT,
    PUT_ALWAYS_POST,
    QUIET,
    SIGNAL_IMM,
    BareQp,
    words,
)

LOCAL, REMOTE = 0x7F0011223344, 0x7E00AABBCCDD
WARP_SIZES = [1, 4, 32]


def one_region(depth=64, **options):
    return BareQp(
        depth, [(LOCAL, LOCAL + (1 << 20), 0x11223344)], [(REMOTE, REMOTE + (1 << 20), 0x55667788)],
        **options,
    )


@pytest.mark.parametrize("warp_size", WARP_SIZES)
def test_write_wqe_is_the_golden_one(warp_size):
    qp = one_region()
    (status,) = qp.run(
        [dict(op=PUT_ALWAYS_POST, remote_addr=REMOTE, local_addr=LOCAL, num_bytes=4096)],
        warp_size=warp_size,
    )
    assert status.code == 0
    assert words(qp.wqe(0)[:48]) == (
        "00000008 abcdef03 00000008 00000000 00007e00 aabbccdd 55667788 00000000 "
        "00001000 11223344 00007f00 11223344"
    )
    assert qp.wqe(0)[48:] == b"\xee" * 16, "only the three segments are written"
    assert words(qp.register) == "00000100 abcdef00"
    assert qp.dbrec[0] == 0, "word 0 of the doorbell record belongs to the receive queue"
    assert qp.rung == 1


@pytest.mark.parametrize("warp_size", WARP_SIZES)
@pytest.mark.parametrize("num_chunks", [1, 2, 31, 32, 33, 70])
def test_put_is_cut_at_region_ends(num_chunks, warp_size):
    """One WQE per chunk; indices, addresses and byte counts continue each other."""
    piece = 100
    remote = [(REMOTE + i * piece, REMOTE + (i + 1) * piece, 0x100 + i) for i in range(num_chunks)]
    qp = BareQp(128, [(LOCAL, LOCAL + (1 << 20), 1)], remote)
    (status,) = qp.run(
        [dict(op=PUT_ALWAYS_POST, remote_addr=REMOTE + 1, local_addr=LOCAL,
              num_bytes=num_chunks * piece - 1)], warp_size=warp_size,
    )
    assert status.code == 0
    assert qp.rung == num_chunks
    at, source = REMOTE + 1, LOCAL
    for i in range(num_chunks):
        wqe = qp.wqe(i)
        assert wqe[0] == 0 and wqe[3] == 8
        assert int.from_bytes(wqe[1:3], "big") == i, "every WQE carries its own index"
        assert int.from_bytes(wqe[16:24], "big") == at
        assert int.from_bytes(wqe[24:28], "big") == 0x100 + i
        count = int.from_bytes(wqe[32:36], "big")
        assert count == (piece - 1 if i == 0 else piece)
        assert int.from_bytes(wqe[40:48], "big") == source
        at, source = at + count, source + count


def test_put_is_cut_at_local_ends_and_at_one_byte():
    local = [(LOCAL, LOCAL + 1, 7), (LOCAL + 1, LOCAL + 50, 8), (LOCAL + 50, LOCAL + 4096, 9)]
    remote = [(REMOTE, REMOTE + 20, 1), (REMOTE + 20, REMOTE + 4096, 2)]
    qp = BareQp(16, local, remote)
    qp.run([dict(op=PUT_ALWAYS_POST, remote_addr=REMOTE, local_addr=LOCAL, num_bytes=60)])
    pieces = [
        (int.from_bytes(w[32:36], "big"), int.from_bytes(w[36:40], "big"),
         int.from_bytes(w[24:28], "big")) for w in map(qp.wqe, range(4))
    ]
    assert pieces == [(1, 7, 1), (19, 8, 1), (30, 8, 2), (10, 9, 2)]


def test_chunks_stay_below_the_largest_message():
    """log_msg_max is 30: a 2.5 GiB put inside one region becomes three WQEs."""
    size = 5 << 29
    qp = BareQp(16, [(1 << 40, (1 << 40) + size, 1)], [(1 << 41, (1 << 41) + size, 2)])
    qp.run([dict(op=PUT_ALWAYS_POST, remote_addr=1 << 41, local_addr=1 << 40, num_bytes=size)])
    counts = [int.from_bytes(qp.wqe(i)[32:36], "big") for i in range(3)]
    assert counts == [1 << 30, 1 << 30, 1 << 29]


def test_zero_bytes_make_no_wqe():
    qp = one_region()
    (status,) = qp.run(
        [dict(op=PUT_ALWAYS_POST, remote_addr=REMOTE, local_addr=LOCAL, num_bytes=0)]
    )
    assert status.code == 0 and qp.state.resv_head == 0 and qp.rung == 0


@pytest.mark.parametrize("where", ["local", "remote"])
def test_unregistered_address_is_an_error(where):
    qp = one_region()
    operation = dict(op=PUT_ALWAYS_POST, remote_addr=REMOTE, local_addr=LOCAL, num_bytes=8)
    operation[f"{where}_addr"] = 0x1000
    (status,) = qp.run([operation])
    assert status.code == 4 and qp.state.resv_head == 0


def test_put_running_out_of_a_region_sends_nothing_of_that_round():
    qp = one_region()
    (status,) = qp.run([dict(op=PUT_ALWAYS_POST, remote_addr=REMOTE + (1 << 20) - 8,
                             local_addr=LOCAL, num_bytes=64)])
    assert status.code == 4 and qp.rung == 0 and qp.state.resv_head == 0


def test_every_fourth_message_rings_and_the_tail_with_quiet():
    qp = one_region()
    put = dict(op=PUT, remote_addr=REMOTE, local_addr=LOCAL, num_bytes=8)
    qp.run([{**put, "message_idx": i} for i in range(3)])
    assert qp.rung == 0
    qp.run([{**put, "message_idx": 3}])
    assert qp.rung == 4
    qp.run([{**put, "message_idx": 0}])
    assert qp.rung == 4
    (status,) = qp.run([dict(op=QUIET)])  # nobody completes: times out, but the tail has left
    assert qp.rung == 5
    assert (status.code, status.stage, status.expected, status.seen) == (3, 5, 5, 0)


def test_full_ring_waits_then_refuses_and_overwrites_nothing():
    qp = one_region(depth=16, timeout_ns=2_000_000)
    put = dict(op=PUT_ALWAYS_POST, remote_addr=REMOTE, local_addr=LOCAL, num_bytes=8)
    qp.run([put] * 16)
    before = bytes(qp.ring)
    (status,) = qp.run([put] * 160)
    assert status.code == 1 and status.stage == 3
    assert bytes(qp.ring) == before and qp.state.resv_head == 16
    qp.complete(4)
    qp.run([put] * 5)
    assert qp.state.resv_head == 21 and qp.rung == 21
    (status,) = qp.run([put])
    assert status.code == 1


def test_error_completion_is_returned_with_syndrome_and_index():
    qp = one_region()
    put = dict(op=PUT_ALWAYS_POST, remote_addr=REMOTE, local_addr=LOCAL, num_bytes=8)
    qp.run([put] * 3)
    qp.complete(1, opcode=13, syndrome=0x13)
    (status,) = qp.run([dict(op=QUIET)])
    assert (status.code, status.syndrome, status.wqe_idx) == (2, 0x13, 1)
    (status,) = qp.run([put])
    assert status.code == 2, "a failed queue refuses further work at once"


@pytest.mark.parametrize("start", [0, 65530, (1 << 32) - 3, (1 << 40) + 65535])
@pytest.mark.parametrize("depth", [16, 1024, 32768])
def test_quiet_is_right_across_wraps(start, depth):
    """The truth table of the 16-bit counter against 64-bit indices."""
    qp = one_region(depth=depth, start=start, timeout_ns=100_000)
    put = dict(op=PUT_ALWAYS_POST, remote_addr=REMOTE, local_addr=LOCAL, num_bytes=8)
    if start:
        qp.complete(start - 1)
    (status,) = qp.run([dict(op=QUIET)])
    assert status.code == 0, "nothing in flight"
    qp.run([put] * 16)
    for done in (0, 1, 15, 16):
        if done:
            qp.complete(start + done - 1)
        (status,) = qp.run([dict(op=QUIET)])
        assert (status.code == 0) == (done == 16)
        assert qp.state.cons_idx == start + done


def test_fresh_queue_zero_filled_cq_would_be_seen_as_done_so_the_fill_matters():
    """0xff is the contract: a zeroed CQE reads as completion of WQE 0."""
    qp = one_region(timeout_ns=100_000)
    qp.run([dict(op=PUT_ALWAYS_POST, remote_addr=REMOTE, local_addr=LOCAL, num_bytes=8)])
    (status,) = qp.run([dict(op=QUIET)])
    assert status.code == 3
    qp.cq[:] = [0] * 16
    (status,) = qp.run([dict(op=QUIET)])
    assert status.code == 0


def test_200000_posts_keep_every_field_in_its_bits():
    qp = one_region(depth=64)
    put = dict(op=PUT_ALWAYS_POST, remote_addr=REMOTE, local_addr=LOCAL, num_bytes=8)
    for base in range(0, 200_000, 64):
        (status,) = qp.run([put] * 64, warp_size=1)
        assert status.code == 0
        for i in range(64):
            raw = qp.wqe(i)
            assert raw[0] == 0 and raw[3] == 8
            assert int.from_bytes(raw[1:3], "big") == (base + i) & 0xFFFF
        qp.complete(base + 63)


@pytest.mark.parametrize("warp_size", WARP_SIZES)
def test_inline_atomic_read_and_immediate_bytes(warp_size):
    qp = one_region()
    qp.state.scratch_addr, qp.state.scratch_lkey_be = 0x7F0011223344, 0x44332211
    statuses = qp.run([
        dict(op=INLINE, remote_addr=REMOTE, value=0x44434241, num_bytes=4),
        dict(op=ADD4, remote_addr=REMOTE, value=5),
        dict(op=ADD8, remote_addr=REMOTE, value=5),
        dict(op=GET, remote_addr=REMOTE, local_addr=LOCAL, num_bytes=16),
        dict(op=SIGNAL_IMM, remote_addr=REMOTE, value=0x01020304),
    ], warp_size=warp_size)
    assert statuses[0].code == 0
    raddr = "00007e00 aabbccdd 55667788 00000000"
    sink = "11223344 00007f00 11223344"
    assert words(qp.wqe(0)[:40]) == f"00000008 abcdef03 00000008 00000000 {raddr} 80000004 41424344"
    assert words(qp.wqe(1)) == (
        f"08000115 abcdef04 00000008 00000000 {raddr} 00000005 00000000 00000000 00000000 "
        f"00000004 {sink}"
    )
    assert words(qp.wqe(2)) == (
        f"09000215 abcdef04 00000008 00000000 {raddr} 00000000 00000005 00000000 00000000 "
        f"00000008 {sink}"
    )
    assert words(qp.wqe(3)[:48]) == (
        f"00000310 abcdef03 00000008 00000000 {raddr} 00000010 {sink}"
    )
    assert words(qp.wqe(4)[:32]) == f"00000409 abcdef02 00000008 01020304 {raddr}"


@pytest.mark.parametrize("mode", [1, 2])
def test_other_doorbell_modes_leave_the_register_alone(mode):
    import ctypes

    qp = one_region()
    proxy = ctypes.c_uint64()
    qp.state.doorbell_mode, qp.state.proxy_addr = mode, ctypes.addressof(proxy)
    qp.run([dict(op=PUT_ALWAYS_POST, remote_addr=REMOTE, local_addr=LOCAL, num_bytes=8)] * 3)
    assert qp.register == b"\0" * 8 and qp.rung == 3
    assert proxy.value == (3 if mode == 2 else 0)


@pytest.mark.parametrize("seed", range(30))
def test_many_warps_share_a_queue_in_any_interleaving(seed):
    """No slot lost, doubled or rung before it is written, whatever runs when."""
    qp = one_region(depth=256)
    warps, puts = 4, 5
    statuses = qp.run(
        [dict(op=PUT, remote_addr=REMOTE, local_addr=LOCAL, num_bytes=8, message_idx=i)
         for i in range(puts - 1)]
        + [dict(op=PUT_ALWAYS_POST, remote_addr=REMOTE, local_addr=LOCAL, num_bytes=8)],
        warps=warps, warp_size=4, seed=seed,
    )
    assert all(s.code == 0 for s in statuses)
    assert qp.state.resv_head == qp.state.ready_head == warps * puts
    assert qp.rung == qp.state.prod_idx
    for i in range(warps * puts):
        assert int.from_bytes(qp.wqe(i)[1:3], "big") == i
    assert qp.wqe(warps * puts) == b"\xee" * 64
