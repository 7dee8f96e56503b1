"""What needs no tensors imports no torch, which takes seconds; mistakes are told before it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from expertwire.demo import demo_model_path

MODEL = demo_model_path()
# Runs every command of a JSON list in one interpreter, then prints what is imported.
RUN = """
import contextlib, json, os, sys
from expertwire.cli import app
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["expertwire", *arguments]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        with contextlib.suppress(SystemExit):
            app.main()
            print(arguments, "did not end")
print(json.dumps([name for name in json.loads(os.environ["NAMES"]) if name in sys.modules]))
"""


def imported(commands: list[list[str]], names: list[str]) -> tuple[list[str], str]:
    """Which of the modules are imported once the commands have run; and their standard error."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(commands)], capture_output=True, text=True,
        env={**os.environ, "NAMES": json.dumps(names)}, timeout=100, check=True,
    )
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_looking_and_planning_need_no_torch(tmp_path):
    """Each of them runs, up to an error where nothing is there to look at."""
    (tmp_path / "ring").write_bytes(bytes(64))
    found, errors = imported([
        ["--help"], *([name, "--help"] for name in (
            "demo", "registry", "serve", "generate", "openai", "status", "doctor", "chaos", "up")),
        ["plan", MODEL, "--tokens-per-step", "16", "--clients", "4"],
        ["wqe", "decode", str(tmp_path / "ring")],
        ["trace", "summary", str(tmp_path / "none")],
        ["status", "--registry", "127.0.0.1:1"],
        ["drain", "a", "--registry", "127.0.0.1:1"],
        ["rebalance", "--registry", "127.0.0.1:1"],
        ["registry", "--listen", "nonsense"],
    ], ["torch", "transformers", "expertwire.planning.predict", "expertwire.hca.ring"])
    assert found == ["expertwire.planning.predict", "expertwire.hca.ring"], errors


@pytest.mark.parametrize(("arguments", "text"), [
    (["serve", "/nowhere", "--experts", "0"], "not a folder"),
    (["serve", MODEL, "--experts", "0-99"], "not within 0-15"),
    (["serve", MODEL, "--experts", "x"], "neither a number nor a range"),
    (["generate", "/nowhere", "x"], "not a folder"),
    (["openai", "/nowhere"], "not a folder"),
    (["demo", "--servers", "17"], "from 1 to 16"),
    (["demo", "--model", "/nowhere"], "not a folder"),
], ids=lambda given: given if isinstance(given, str) else given[0])
def test_a_mistake_is_told_without_torch(arguments, text):
    found, errors = imported([arguments], ["torch", "transformers"])
    assert found == [] and text in errors
