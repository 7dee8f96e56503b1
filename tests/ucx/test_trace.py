"""What a trace says of entries for another host: when they left, and when that host had executed
them."""

from __future__ import annotations

import pytest

from expertwire.hca.wqe import syndrome_name
from expertwire.trace import recorder as trace
from expertwire.trace.chrome import WAY
from expertwire.trace.summary import message_phases, ways
from tests import chrome_trace
from tests.system.cluster import batch, cluster, model_facts
from tests.ucx.test_wire import REMOTE_ACCESS, End


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.json"


def entries(path):
    return [e for e in chrome_trace.read(path) if e["ph"] == "X" and e["cat"] == "hca"]


@pytest.mark.parametrize("hidden_size", [64, 7168], ids=["one frame", "several frames"])
def test_every_message_has_its_whole_way(path, hidden_size):
    model = model_facts(hidden_size=hidden_size)
    with cluster([range(4), range(4, 8)], model, server_options={"hca": "ucx"}, hca="ucx",
                 max_rows=32) as (client, _, _), trace.tracing(path):
        for layer in (0, 1):
            client.moe(layer, *batch(32, model))
        # A reply's last entries may be acknowledged after the trace has ended.
    slices = [e for e in chrome_trace.read(path) if e["ph"] == "X"]
    found = ways(slices)
    assert len(found) == 4 and message_phases(slices)["count"] == 4
    for message, way in found.items():
        assert set(WAY) - {"wait"} <= set(way), message
    posted = {(of, m["id"], wqe["index"]): wqe for e in slices
              for of in ("request", "reply") if e["name"] == {"request": "put"}.get(of, of)
              for m in e["args"]["messages"] for wqe in m["wqes"]}
    sent = {(e["args"]["of"], e["args"]["message"], e["args"]["index"]): e
            for e in slices if e["cat"] == "hca"}
    assert sent.keys() == posted.keys() and len(sent) == 4 * 2 * 3  # messages, directions, puts
    for key, entry in sent.items():
        assert "error" not in entry["args"] and entry["args"]["moved"] == posted[key]["bytes"]
        if key[0] == "request":  # its reply came, which was sent after it was taken
            assert entry["args"].get("acknowledged_us", entry["dur"]) >= entry["dur"] > 0
    assert sum("acknowledged_us" in entry["args"] for entry in sent.values()) >= 12


def test_what_the_peer_refuses_is_in_it(path):
    here, there = End(), End()
    here.connect(there.window.wire)
    there.connect(here.window.wire)
    try:
        with trace.tracing(path):
            here.write(there.memory.addr, there.rkey + 1, 8)
            here.wait_done()
    finally:
        here.close()
        there.close()
    (entry,) = entries(path)
    assert entry["args"]["error"] == syndrome_name(REMOTE_ACCESS)
    assert entry["args"]["acknowledged_us"] > 0 and entry["args"]["bytes"] == 8


def test_an_entry_that_never_left_is_in_it(path):
    here, there = End(), End()
    here.connect(there.window.wire)
    there.connect(here.window.wire)
    try:
        with trace.tracing(path):
            here.hca.set_hook(lambda *_: 0x04)
            here.write(there.memory.addr, there.rkey, 8)
            here.wait_done()
    finally:
        here.close()
        there.close()
    (entry,) = entries(path)
    assert entry["args"]["error"] == syndrome_name(0x04) and entry["dur"] == 0
