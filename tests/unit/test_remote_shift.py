"""Keys that say where memory lies inside what the peer maps, as between processes."""

from __future__ import annotations

import pytest
from tests.conformance import rig

from expertwire.hca.kernel import KernelHca
from expertwire.target import CpuTarget


@pytest.mark.parametrize("offset", [0, 8, 4000])
def test_a_key_counts_from_the_mapping(monkeypatch, offset):
    """Also its very first byte, whose place inside the mapping is 0."""
    monkeypatch.setattr(rig, "SoftHca", lambda thread=False: KernelHca(CpuTarget(2), warps=2))
    with rig.Rig() as r:
        for entry in r.window.keys.entries:
            if entry.valid:
                entry.mapped -= r.remote.addr
        r.qp.state_struct.remote_shift = r.remote.addr
        r.fill(0, b"0123456789")
        assert not r.do(r.write(offset, 0, 10)).is_error
        assert r.at_remote(offset, 10) == b"0123456789"
        assert not r.do(r.inline(offset, b"flag8byt")).is_error
        assert r.at_remote(offset, 10) == b"flag8byt89"
        assert r.do(r.write(r.remote.num_bytes - 4, 0, 10)).syndrome == rig.REMOTE_ACCESS
