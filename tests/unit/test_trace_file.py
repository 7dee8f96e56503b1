"""A process's records: their layout, their limit, and what is left of a process that was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from tests import chrome_trace
from tests.leftovers import nothing_left_behind

from expertwire.errors import ConfigError
from expertwire.launch import struct_bytes
from expertwire.trace import recorder as trace
from expertwire.trace.chrome import merge
from expertwire.trace.file import (
    HEADER_BYTES,
    KIND_SPAN,
    RECORD_BYTES,
    Record,
    boot_id,
    parts_folder,
    read_part,
)
from expertwire.trace.summary import load_trace


@pytest.fixture
def path(tmp_path):
    return tmp_path / "t.json"


def spans(path):
    return [e["name"] for e in chrome_trace.read(path) if e["ph"] == "X"]


def only_part(path):
    (part,) = parts_folder(path).glob("*.part")
    return part


def test_python_and_native_agree_on_a_record():
    assert struct_bytes("TraceRecord") == RECORD_BYTES == 160


def test_fields_arrive_as_they_were_written(path):
    fields = dict(begin_ns=5, end_ns=9, kind=KIND_SPAN, stage=2, layer=3, client=4, server=6,
                  seq=1 << 40, hca=1 << 50, qpn=7, rows=8, idx=1 << 33, num_bytes=10, syndrome=11,
                  reason=12)
    trace.start(path, name="me")
    try:
        trace.add(Record(wqe=bytes(range(64)), **fields))
        part = read_part(only_part(path))  # while it is written
    finally:
        trace.stop()
    assert part.pid == os.getpid() and part.name == "me" and part.num_lost == 0
    (record,) = part.records
    assert {name: int(record[name]) for name in fields} == fields
    assert bytes(record["wqe"]) == bytes(range(64)) and record["number"] == 1
    assert record["thread"] == threading.get_native_id()


@pytest.mark.parametrize(("capacity", "count"), [(8, 8), (8, 9), (8, 100), (1, 3)])
def test_the_last_records_are_kept(path, capacity, count):
    trace.start(path, num_records=capacity)
    try:
        for i in range(count):
            with trace.span(f"s{i}"):
                pass
        part = read_part(only_part(path))
        assert only_part(path).stat().st_size == HEADER_BYTES + capacity * RECORD_BYTES
    finally:
        trace.stop()
    assert spans(path) == [f"s{i}" for i in range(count - capacity, count)]
    assert part.num_lost == count - capacity
    names = [e["args"]["name"] for e in chrome_trace.read(path) if e["ph"] == "M"]
    assert any("older records lost" in name for name in names) == (count > capacity)


def test_many_threads_lose_nothing(path):
    with trace.tracing(path):
        threads = [threading.Thread(target=lambda i=i: [trace.add(Record(
            kind=KIND_SPAN, begin_ns=100 * n, end_ns=100 * n + 50, wqe=f"{i}-{n}".encode(),
        )) for n in range(500)]) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(spans(path)) == sorted(f"{i}-{n}" for i in range(4) for n in range(500))


def test_stopping_while_others_write_is_safe(path):
    """The mapping goes away under nobody."""
    stop = threading.Event()

    def write():
        while not stop.is_set():
            trace.add(Record(kind=KIND_SPAN, wqe=b"x"))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(30):
            with trace.tracing(path):
                pass
    finally:
        stop.set()
        writer.join()


def test_a_torn_record_is_left_out(path):
    trace.start(path)
    try:
        for name in ("a", "b", "c"):
            with trace.span(name):
                pass
        part = only_part(path)
        with part.open("r+b") as file:  # killed while it wrote the second
            file.seek(HEADER_BYTES + RECORD_BYTES)
            file.write(bytes(8))
    finally:
        trace.stop()
    assert spans(path) == ["a", "c"]


WRITER = """
import sys, os
from expertwire import trace
trace.start(sys.argv[1], name=sys.argv[2])
with trace.span("of " + sys.argv[2]):
    pass
print("ready", flush=True)
sys.stdin.readline()
"""


def writer(path, name):
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path), name], text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_kill_9_leaves_what_was_written_and_the_next_trace_is_a_new_one(path):
    process = writer(path, "killed")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not path.exists()
    merge(path)
    assert spans(path) == ["of killed"] and not parts_folder(path).exists()
    process = writer(path, "killed again")
    process.kill()
    process.communicate()
    with trace.tracing(path), trace.span("new"):  # nobody lives: not of the old trace
        pass
    assert spans(path) == ["new"]


def test_a_killed_process_of_a_trace_that_goes_on_is_in_it(path):
    with trace.tracing(path), trace.span("here"):
        process = writer(path, "other")
        process.kill()
        process.communicate()
        merge(path)
        assert spans(path) == ["of other"]  # and the one here is not over yet
        assert len(list(parts_folder(path).glob("*.part"))) == 2
    assert set(spans(path)) == {"here", "of other"}


def test_the_last_process_merges(path):
    with trace.tracing(path):
        process = writer(path, "longer")
    assert not path.exists()
    process.communicate("\n", timeout=20)
    assert process.returncode == 0 and spans(path) == ["of longer"]


def test_two_traces_at_once_are_refused(path):
    with trace.tracing(path), pytest.raises(ConfigError, match="already writes the trace"):
        trace.start(path.with_name("other.json"))
    with trace.tracing(path):  # and it is free again
        pass


def test_it_leaves_nothing_behind(path):
    with nothing_left_behind(), trace.tracing(path), trace.span("x"):
        pass
    assert [p.name for p in path.parent.iterdir()] == ["t.json"]
    assert trace.stop() is None and not trace.active


@pytest.mark.parametrize("text", ["0", "-1", "many", "1e9", str(1 << 40)])
def test_a_number_of_records_that_is_none(path, monkeypatch, text):
    monkeypatch.setenv("EXPERTWIRE_TRACE_RECORDS", text)
    with pytest.raises(ConfigError, match="EXPERTWIRE_TRACE_RECORDS"):
        trace.start(path)


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        trace.start(tmp_path / "file" / "t.json")
    assert not trace.active


@pytest.mark.parametrize("damage", [b"", b"x" * 10, bytes(HEADER_BYTES)])
def test_a_file_that_is_no_part(path, damage):
    other = path.with_name("x.part")
    other.write_bytes(damage)
    with pytest.raises(ConfigError, match="no part of a trace"):
        merge(path, [other])


def test_names_of_any_length_and_kind(path):
    with trace.tracing(path, name="ü" * 3000):
        for name in ("ä" * 100, "<&\"'\n", "x"):
            with trace.span(name):
                pass
    assert spans(path) == ["ä" * 32, "<&\"'\n", "x"]


def test_the_environment_begins_a_trace(path, monkeypatch):
    trace.join("nobody asked")
    assert not trace.active
    monkeypatch.setenv("EXPERTWIRE_TRACE", str(path))
    trace.join("first")
    trace.join("second")
    try:
        assert trace.active
    finally:
        trace.stop()
    assert chrome_trace.read(path)[0]["args"]["name"] == "first, second"


def test_a_boot_has_one_name():
    assert boot_id() == boot_id() and len(boot_id()) == 16


@pytest.mark.parametrize("text", ["{}", "[1]", '{"traceEvents": [1]}',
                                  '{"traceEvents": [{"ph": "X", "name": "put"}]}'])
def test_a_file_that_is_no_trace(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ConfigError, match="not a trace of ours"):
        load_trace(tmp_path / "other.json")


@pytest.mark.parametrize("wrong", [
    {"ts": "1"}, {"dur": None}, {"name": 3}, {"cat": []}, {"args": 1}, {"pid": {}},
    {"ts": float("nan")}, {"args": {"messages": 1}}, {"args": {"messages": [{"x": 1}]}},
    {"args": {"messages": [3]}}, {"args": {"messages": ["a.1.1"]}}, {"args": {"moved": "x"}},
    {"cat": "hca", "args": {"message": "a.1.1"}},
], ids=str)
def test_a_slice_that_is_none_of_ours(tmp_path, wrong):
    good = {"ph": "X", "name": "combine", "cat": "client", "ts": 0, "dur": 1, "pid": 1, "tid": 1,
            "args": {"layer": 0, "messages": ["a.1.1"]}}
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"traceEvents": [good]}))
    assert load_trace(file) == [good]
    file.write_text(json.dumps({"traceEvents": [good | wrong]}))
    with pytest.raises(ConfigError, match="not a trace of ours: slice"):
        load_trace(file)


def test_a_merge_that_fails_leaves_nothing(tmp_path):
    (tmp_path / "no.part").write_bytes(b"no part")
    with pytest.raises(ConfigError, match="no part of a trace"):
        merge(tmp_path / "trace.json", [tmp_path / "no.part"])
    assert [path.name for path in tmp_path.iterdir()] == ["no.part"]
