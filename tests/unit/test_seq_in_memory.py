"""client_pack and client_put with the sequence number in memory, as launches in graphs have it."""

from __future__ import annotations

import pytest
from tests.steps import make_step, see_wire

from expertwire.target import CpuTarget


@pytest.mark.parametrize("name", ["one row", "three servers, per expert", "fp8"])
@pytest.mark.parametrize("warp_size", [1, 32])
def test_the_next_seq_is_taken_and_noted(name, warp_size):
    """Three launches of the same arguments make what three sequence numbers by hand make."""
    target = CpuTarget(warp_size)
    steps = [make_step(target, name, seed=5)[0] for _ in range(2)]
    by_hand, by_itself = steps
    by_itself.seq.write((40).to_bytes(8, "little"))
    by_itself.pack.seq = by_itself.put.seq = by_itself.seq.addr
    for seq in (41, 42, 43):
        by_hand.set_seq(seq)
        for step in steps:
            target.prepare([("client_route", step.route), ("client_pack", step.pack),
                            ("client_put_ibgda", step.put)], grid=[1, 3, 1], warps=2).run()
        assert int.from_bytes(by_itself.seq.read(), "little") == seq
        assert [s.read() for s in by_hand.send] == [s.read() for s in by_itself.send]
        sent = [[see_wire(wire) for wire in step.wires] for step in steps]
        assert sent[0] == sent[1] and sent[0][0]["wqes"]
