"""One slot, used again and again over a path that delays: never a row of an earlier batch."""

from __future__ import annotations

import pytest
import torch
from tests.system.cluster import cluster, model_facts
from tests.system.test_relaxed_path import path  # noqa: F401 (a fixture)

MODEL = model_facts(num_experts=4, hidden_size=48)
BOTH = [[0, 1, 2, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize(("faults", "signal_mode"), [
    (dict(mtu=64, max_delay=5), "write"), (dict(mtu=64, max_delay=5, reorder=True), "add"),
])
def test_a_slot_that_is_used_again_never_gives_old_rows(request, path, faults, signal_mode):  # noqa: F811
    """Row r of batch n holds n and r: a stale payload, head or flag shows in the sum.

    One batch at a time through three threads: beside other work they must sleep, not spin. Who
    yields a core that others want has it back after their time slices, who is woken at once.
    """
    path(**faults)
    count = request.config.getoption("--slot-reuse")
    ids = torch.tensor([[0, 3], [1, 2], [2, 0]])
    weights = torch.tensor([[0.5, 0.25], [1.0, 0.5], [0.25, 0.25]])
    scale = ((ids + 1) * weights).sum(dim=1, keepdim=True)
    plus = (ids * weights).sum(dim=1, keepdim=True)
    with cluster(BOTH, MODEL, num_slots=1, signal_mode=signal_mode, spin_us=0,
                 server_options=dict(spin_us=0)) as (client, servers, _):
        for n in range(count):
            hidden = torch.full((3, 48), float(n % 4096))
            hidden[:, 0] += torch.arange(3)
            out = client.moe(0, hidden, ids, weights)
            assert torch.equal(out, hidden * scale + plus), f"batch {n}"
        assert client.num_retries == 0
        slots = [server.batcher.slots[0] for server in servers if server.batcher.num_slots]
        assert max(slot.last_seq for slot in slots) == client.seq == count, "one slot, every time"
