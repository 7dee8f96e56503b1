"""Commands whose output has no place to go: a plain error, no traceback, a code that says so."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SLICE = {"ph": "X", "name": "x", "cat": "span", "ts": 0, "dur": 1, "pid": 1, "tid": 1, "args": {}}


@pytest.fixture(params=["help", "summary", "doctor"])
def command(request, tmp_path):
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": [SLICE] * 2}))
    return [sys.executable, "-m", "expertwire", *{
        "help": ["--help"], "summary": ["trace", "summary", str(file)],
        "doctor": ["doctor", "--json", "--seconds", "0.5"],
    }[request.param]]


def test_a_full_disk_is_one_line(command):
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert ended.stderr == "expertwire: cannot write: No space left on device\n"
    assert ended.returncode == 1


def test_a_reader_that_went_away_is_no_error_to_print(command):
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(60) in (1, 141)
    process.stderr.close()
