"""client_failover: who is silent is lost, and the same batch goes to replicas, to the bit."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from tests.failover_rig import SHARES, FailoverRig

from expertwire.device_structs import LOST_DISCONNECTED, STATUS_PEER_LOST, STATUS_TIMEOUT
from expertwire.target import CpuTarget

SILENT = 1


def rig(**options) -> FailoverRig:
    target = CpuTarget(options.pop("warp_size", 4))
    return FailoverRig(target, target.alloc(4 * len(SHARES)), **options)


def test_nothing_happens_when_all_answer():
    r = rig()
    r.send()
    r.serve(0, 1, 2, 3)
    assert r.fail_over() < 0.5
    assert r.will_resend() == 0 and not r.lost.any()
    before = [server.recv.read() for server in r.step.servers]
    r.send(again=True)
    assert [server.recv.read() for server in r.step.servers] == before, "nothing is sent again"
    assert torch.equal(r.combine(), r.want()) and r.status().code == 0


@pytest.mark.parametrize("warp_size", [1, 4, 32])
@pytest.mark.parametrize("silent", [[0], [1], [3], [1, 3], [1, 2, 3]], ids=str)
def test_silent_servers_are_replaced(silent, warp_size):
    r = rig(warp_size=warp_size)
    others = [s for s in range(4) if s not in silent]
    r.send()
    assert r.loaded() == [0, 1, 2, 3]
    r.serve(*others)
    r.fail_over()
    assert r.lost.tolist() == [SILENT * (s in silent) for s in range(4)] and r.will_resend() == 1
    r.send(again=True)
    assert r.loaded() == others
    r.serve(*others)
    assert torch.equal(r.combine(), r.want()) and r.status().code == 0
    # The next batch does not go there, so nothing waits for a deadline again.
    r.send()
    assert r.loaded() == others
    r.serve(*others)
    assert r.fail_over() < 0.5 and r.will_resend() == 0
    assert torch.equal(r.combine(), r.want())


def test_ids_that_are_no_expert_are_counted_once():
    r = rig()
    ids = r.batch[1]
    ids[3, 0], ids[7, 2] = -1, 99
    r.step.ids.write(ids)
    r.send()
    r.serve(0, 2, 3)
    r.fail_over()
    r.send(again=True)
    r.serve(0, 2, 3)
    assert torch.equal(r.combine(), r.want())
    assert int.from_bytes(r.step.num_skipped.read(), "little") == 2


def test_what_the_host_knows_ends_the_wait():
    r = rig(timeout_ns=20_000_000_000)
    r.send()
    r.serve(0, 1, 3)
    timer = threading.Timer(0.1, lambda: r.lost.__setitem__(2, LOST_DISCONNECTED))
    timer.start()
    assert r.fail_over() < 5
    timer.join()
    assert r.lost.tolist() == [0, 0, LOST_DISCONNECTED, 0] and r.will_resend() == 1


def test_an_answer_of_one_that_is_gone_since_still_counts():
    r = rig()
    r.send()
    r.serve(0, 1, 2, 3)
    r.lost[:] = LOST_DISCONNECTED
    r.fail_over()
    assert r.will_resend() == 0 and torch.equal(r.combine(), r.want())


@pytest.mark.parametrize(("known", "code"), [
    (0, STATUS_TIMEOUT), (LOST_DISCONNECTED, STATUS_PEER_LOST),
])
def test_an_expert_that_nobody_holds_any_more_is_an_error(known, code):
    r = rig(shares=[[0, 1, 2, 3, 4], [0, 1, 2], [3, 4, 5], [1, 4]])
    r.lost[2] = known
    r.send()
    r.serve(0, 1, 3)
    r.fail_over()
    status = r.status()
    assert (status.code, status.stage, status.peer) == (code, 10, 2)
    assert r.will_resend() == 0
    start = time.monotonic()
    r.combine()
    assert time.monotonic() - start < 1, "nobody waits once it has failed"


def test_lists_keep_their_order():
    r = rig()
    r.send()
    r.serve(0, 2, 3)
    r.fail_over()
    table = np.frombuffer(r.step.expert_servers.read(), np.int32).reshape(6, -1)
    assert table.tolist() == [[0, -1, -1], [0, 3, -1], [0, -1, -1], [0, 2, -1], [0, 2, 3],
                              [0, 2, -1]]
