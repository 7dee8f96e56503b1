"""One slot used again and again, by somebody who is slow: never the old bytes under a new flag."""

from __future__ import annotations

import ctypes

import numpy as np

from expertwire.device_structs import IbgdaOperation
from expertwire.hca.fault import Faults, FaultyHca
from expertwire.launch import Launch, hca_array
from tests.conformance.rig import DeviceRig
from tests.queue_pair import ADD8, AWAIT, COPY, FILL, PUT

ROUNDS, LAUNCHES, NUM_BYTES = 1000, 100, 192
SOURCE, SLOT, FLAG, ACKNOWLEDGED = 0, 0, 4096, 8192


def test_44_one_slot_reused_100000_times_with_a_late_payload():
    """The writer waits for the reader's word before it uses the slot again, as credits do. The
    payload comes in pieces, in any order and late; the flag counts up by masked fetch-add."""
    with DeviceRig(64, timeout_ns=10**10) as rig:
        here = FaultyHca(rig.here, Faults(seed=9, mtu=64, reorder=True, max_delay=6))
        log = rig.here.alloc(ROUNDS * NUM_BYTES)
        ack = rig.local.addr + ACKNOWLEDGED
        writer, reader = [], []
        for seq in range(1, ROUNDS + 1):
            writer += [
                dict(op=FILL, local_addr=rig.local.addr, num_bytes=NUM_BYTES, value=seq),
                rig.operation(PUT, SLOT, SOURCE, num_bytes=NUM_BYTES),
                rig.operation(ADD8, FLAG, value=1),
                dict(op=AWAIT, local_addr=ack, value=seq),
            ]
            reader += [
                dict(op=AWAIT, local_addr=rig.remote.addr + FLAG, value=seq),
                dict(op=COPY, remote_addr=rig.remote.addr + SLOT, num_bytes=NUM_BYTES,
                     local_addr=log.addr + (seq - 1) * NUM_BYTES),
                dict(op=FILL, local_addr=ack, num_bytes=8, value=seq),
                dict(op=FILL, local_addr=ack + 64, num_bytes=8, value=seq),
            ]
        args, status = rig.run_args([writer, reader])
        table = (IbgdaOperation * (8 * ROUNDS)).from_address(args.operations)
        numbered = np.isin(np.array([o.op for o in table]), [FILL, AWAIT])
        values = np.ctypeslib.as_array(
            (ctypes.c_uint64 * (6 * 8 * ROUNDS)).from_address(args.operations)
        ).reshape(-1, 6)[:, 3]
        for first in range(1, LAUNCHES * ROUNDS, ROUNDS):
            Launch([("ibgda_run", args)], warps=2).run(hca_array(here.pointer))
            assert [s.code for s in status] == [0, 0], f"rounds from {first}: {list(status)}"
            seen = np.ctypeslib.as_array(
                (ctypes.c_uint64 * (ROUNDS * NUM_BYTES // 8)).from_address(log.addr)
            ).reshape(ROUNDS, -1)
            want = np.arange(first, first + ROUNDS, dtype=np.uint64)
            assert (seen == want[:, None]).all(), "bytes of another round under this round's flag"
            values[numbered] += ROUNDS
        assert here.relaxed_ordering
        log.close()
