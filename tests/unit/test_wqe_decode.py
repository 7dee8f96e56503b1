"""`expertwire wqe decode`: rings dumped by real runs, planted faults, files that are none."""

from __future__ import annotations

import json
import shutil

import pytest
from tests.queue_pair import BareQp
from tests.system.cluster import batch, cluster, model_facts
from typer.testing import CliRunner

from expertwire.cli.app import app
from expertwire.errors import ConfigError
from expertwire.hca.ring import entries, read_rings, ring_lines, write_ring
from expertwire.hca.wqe import DataSegment, Wqe


def decode(*arguments):
    result = CliRunner().invoke(app, ["wqe", "decode", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def decode_json(*arguments):
    code, output = decode(*arguments, "--json")
    return code, json.loads(output)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(folder with the rings of one client and one server, what the client counted)."""
    folder = tmp_path_factory.mktemp("run") / "rings"
    model = model_facts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXPERTWIRE_DUMP", str(folder))
        with cluster([range(8)], model, queue_depth=16) as (client, _, _registry):
            for seed in range(9):  # 27 entries: the ring of 16 went round
                client.moe(seed % 2, *batch(5, model, seed=seed))
            counted = client.stats()["servers"]["s0"]
    return folder, counted


@pytest.fixture
def dumped(run, tmp_path):
    """A copy of it that a test may change."""
    return shutil.copytree(run[0], tmp_path / "rings"), run[1]


def test_a_run_leaves_the_rings_of_both_ends(dumped):
    folder, counted = dumped
    files = sorted(folder.iterdir())
    assert len(files) == 2 and counted["messages"] == 9
    for file in files:
        code, facts = decode_json(file)
        assert code == 0 and facts["refused"] == 0, facts
        (ring,) = facts["rings"]
        assert ring["written"] == ring["rung"] == 3 * 9, "three puts for each message"
        assert all(entry["qpn"] == ring["qpn"] for entry in ring["entries"])
        # The client's ring has 16 blocks, the server's 1024.
        first = max(0, 27 - ring["num_wqe"])
        assert [entry["index"] for entry in ring["entries"]] == list(range(first, 27))
        assert all(e["opcode"] == "RDMA_WRITE" and e["ds"] == 3 and e["rung"]
                   for e in ring["entries"])


def test_the_clients_ring_is_what_the_messages_were(dumped):
    """Rows, head with ids, flag; their bytes are those of the layout, at one slot's addresses."""
    folder, counted = dumped
    rings = [read_rings(file)[0] for file in folder.iterdir()]
    (ring,) = [ring for ring in rings if ring.num_wqe == 16]
    found = entries(ring)
    head = 128 + 48  # and int32 ids of 5 rows, 2 experts each, padded to 16
    payload = 5 * 16 * 4 + 48  # and float32 weights likewise
    sizes = [e.as_dict()["bytes"] for e in found]
    assert [sizes[i] for i in range(len(sizes)) if found[i].index % 3 == 0] == [payload] * 5
    assert [sizes[i] for i in range(len(sizes)) if found[i].index % 3 == 1] == [head] * 5
    assert [sizes[i] for i in range(len(sizes)) if found[i].index % 3 == 2] == [8] * 6
    assert 9 * (payload + head + 8) == counted["bytes_sent"]
    for e in found:
        assert e.wqe is not None and e.wqe.rkey and e.wqe.data[0].lkey and e.wqe.raddr
    assert ring.completion() is not None and not ring.completion().is_error


def test_a_client_that_goes_on_is_dumped_with_the_names_of_its_servers(tmp_path):
    model = model_facts()
    with cluster([range(4), range(4, 8)], model, num_qps=2) as (client, _, _registry):
        client.moe(0, *batch(8, model))
        client.dump(tmp_path / "rings")
        client.moe(0, *batch(8, model))
    code, facts = decode_json(tmp_path / "rings")
    assert code == 0 and facts["entries"] == 2 * 3, "three puts to each of two servers"
    assert sorted(ring["name"] for ring in facts["rings"]) == ["s0", "s0", "s1", "s1"]


def test_several_files_are_several_rings(dumped):
    files = sorted(dumped[0].iterdir())
    code, facts = decode_json(*files)
    assert code == 0 and len(facts["rings"]) == 2 and facts["entries"] == 16 + 27


def test_lines_name_what_is_in_an_entry(dumped):
    folder, _ = dumped
    code, text = decode(next(iter(folder.iterdir())), "--last", 2)
    assert code == 0
    title, head, *lines, _, total = text.splitlines()
    assert "written up to 27, rung up to 27, last completion: entry" in title
    assert head.split() == ["index", "opcode", "qpn", "ds", "bytes", "raddr", "rkey", "lkey",
                            "laddr"]
    assert len(lines) == 2 and lines[-1].split()[:2] == ["26", "RDMA_WRITE"]
    assert total.endswith(" 0 that an adapter would refuse")


PLANTED = {
    "wrong index": (1, b"\x77\x77"), "bad opcode 0x7f": (3, b"\x7f"), "DS is 0": (7, b"\0"),
    "wrong QPN": (4, b"\xaa\xbb\xcc"), "byte count 0": (32, bytes(4)),
    "reserved word": (28, b"\0\0\0\1"), "inline overrun": (32, b"\x80\0\0\x40"),
}


@pytest.mark.parametrize("words", PLANTED)
def test_one_planted_fault_is_found_and_nothing_else(dumped, words):
    folder, _ = dumped
    file = next(f for f in folder.iterdir() if read_rings(f)[0].num_wqe == 16)
    at, value = PLANTED[words]
    raw = bytearray(file.read_bytes())
    ring = raw.index(b"\n") + 1
    place = ring + (20 % 16) * 64 + at
    raw[place : place + len(value)] = value
    file.write_bytes(raw)
    code, facts = decode_json(file)
    assert code == 1 and facts["refused"] == 1
    (bad,) = [e for e in facts["rings"][0]["entries"] if e["refused"]]
    assert bad["index"] == 20 and words in bad["refused"][0]
    code, text = decode(file)
    assert code == 1 and f"REFUSED: {words}" in text


def test_what_was_written_and_not_rung_is_marked(tmp_path):
    qp = BareQp(16, [], [])
    for index in range(2):
        raw = Wqe(0x08, index, qp.state.qpn, 0x5000, 9, (DataSegment(64, 7, 0x1000),)).encode()
        qp.ring[index * 64 : index * 64 + len(raw)] = list(raw)
    qp.state.ready_head, qp.state.prod_idx = 2, 1
    qp.complete(0, opcode=13, syndrome=0x13)
    path = tmp_path / "ring"
    with open(path, "wb") as out:
        write_ring(out, qp.state, "bare")
        write_ring(out, qp.state, "again")
    code, text = decode(path)
    assert code == 0 and text.count("not rung yet") == 2
    assert text.startswith("bare: qpn 0xabcdef, 16 blocks, written up to 2, rung up to 1, ")
    assert "error completion of entry 0, syndrome 0x13 (remote access error)" in text


def test_an_entry_over_several_blocks_and_the_rest_of_one_that_is_gone(tmp_path):
    """A ring of 4 blocks: block 3 begins an entry of two blocks that wraps into block 0."""
    qpn = 0x55
    wide = Wqe(0x14, 3, qpn, 0x1000, 1, (DataSegment(8, 2, 0x2000),), atomic=bytes(32), opmod=9)
    narrow = [Wqe(0x08, i, qpn, 0x1000, 1, (DataSegment(8, 2, 0x2000),)) for i in (5, 6)]
    raw = wide.encode().ljust(128, b"\0")
    blocks = [raw[64:], *[w.encode().ljust(64, b"\0") for w in narrow], raw[:64]]

    def dump(written):
        head = {"expertwire_ring": 1, "name": "", "qpn": qpn, "num_wqe": 4, "written": written,
                "rung": written, "completed": 0, "doorbell_record": "", "cqe": ""}
        path = tmp_path / "ring"
        path.write_bytes(json.dumps(head).encode() + b"\n" + b"".join(blocks))
        return read_rings(path)[0]

    found = entries(dump(7))
    assert [(e.index, len(e.raw), e.verdict.refused) for e in found] == \
        [(3, 128, []), (5, 64, []), (6, 64, [])]
    # One block later the wide entry's first block is overwritten; its second is no entry.
    blocks[3] = Wqe(0, 7, qpn).encode().ljust(64, b"\0")
    assert [e.index for e in entries(dump(8))] == [5, 6, 7]


def test_bytes_without_a_head(tmp_path):
    path = tmp_path / "entries"
    raw = [Wqe(0x08, i, 9, 0x1000, 1, (DataSegment(8, 2, 0x2000),)).encode().ljust(64, b"\0")
           for i in (41, 42)]
    path.write_bytes(b"".join(raw))
    code, facts = decode_json(path)
    assert code == 0 and [e["index"] for e in facts["rings"][0]["entries"]] == [41, 42]
    assert decode_json(path, "--index", 7)[1]["refused"] == 2
    path.write_bytes(raw[0][:48])  # one entry, not padded
    assert decode_json(path)[1]["entries"] == 1


@pytest.mark.parametrize("content", [
    b"", b"x" * 17, b'{"expertwire_ring": 1, "qpn": 3}\n', b'{"expertwire_ring": 1, ' + b"x" * 9000,
    b'{"expertwire_ring": 1, "name": "", "qpn": 1, "num_wqe": 99999999, "written": 0, "rung": 0, '
    b'"completed": 0, "doorbell_record": "", "cqe": ""}\n',
    b'{"expertwire_ring": 1, "name": "", "qpn": 1, "num_wqe": 1, "written": 0, "rung": 0, '
    b'"completed": 0, "doorbell_record": "", "cqe": "zz"}\n' + bytes(64),
])
def test_files_that_are_no_dump(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=str(path)):
        read_rings(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_rings(tmp_path / "nothing")


def test_random_bytes_are_read_without_a_crash(tmp_path):
    import random

    generator = random.Random(0)
    for _ in range(200):
        path = tmp_path / "noise"
        path.write_bytes(generator.randbytes(64 * generator.randint(1, 8)))
        (ring,) = read_rings(path)
        found = entries(ring)
        assert found and ring_lines(ring, found)
        json.dumps([entry.as_dict() for entry in found])


def test_a_folder_that_cannot_be_written_does_not_stop_closing(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EXPERTWIRE_DUMP", str(tmp_path / "file" / "below"))
    with cluster([range(8)]):
        pass
    assert "EXPERTWIRE_DUMP" in caplog.text
