"""The examples run as they are, and stay short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example(path, tmp_path):
    assert len(path.read_text().splitlines()) <= 35
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=200, cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
    assert not list(tmp_path.iterdir()), "an example leaves no file behind"


def test_there_are_examples():
    assert len(EXAMPLES) >= 2
