"""client_failover on a GPU, as on the CPU: silent servers are replaced, the host's word counts."""

from __future__ import annotations

import threading

import pytest
import torch

from expertwire.cuda.pinned import PinnedBuffer
from expertwire.device_structs import LOST_DISCONNECTED, STATUS_TIMEOUT
from tests.failover_rig import SHARES, FailoverRig


def rig(gpu, **options) -> FailoverRig:
    return FailoverRig(gpu, PinnedBuffer(4 * len(SHARES)), warps=8, **options)


@pytest.mark.parametrize("silent", [[], [0], [3], [1, 2, 3]], ids=str)
def test_silent_servers_are_replaced(gpu, silent):
    r = rig(gpu)
    others = [s for s in range(4) if s not in silent]
    for _ in range(2):
        r.send()
        r.serve(*[s for s in others if s in r.loaded()])
        r.fail_over()
        assert r.lost.tolist() == [int(s in silent) for s in range(4)]
        if r.will_resend():
            r.send(again=True)
            r.serve(*others)
        assert torch.equal(r.combine(), r.want()) and r.status().code == 0


def test_what_the_host_knows_ends_the_wait_of_a_kernel_that_runs(gpu):
    r = rig(gpu, timeout_ns=20_000_000_000)
    r.send()
    r.serve(0, 1, 3)
    timer = threading.Timer(0.1, lambda: r.lost.__setitem__(2, LOST_DISCONNECTED))
    timer.start()
    assert 0.05 < r.fail_over() < 5
    timer.join()
    assert r.will_resend() == 1


def test_no_replica_left(gpu):
    r = rig(gpu, shares=[[0, 1, 2, 3, 4], [0, 1, 2], [3, 4, 5], [1, 4]])
    r.send()
    r.serve(0, 1, 3)
    r.fail_over()
    assert (r.status().code, r.status().peer) == (STATUS_TIMEOUT, 2)
