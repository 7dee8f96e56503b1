"""Readers that poll memory in a Python thread must not hold the interpreter for long."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _quick_thread_switches():
    """Every ctypes call gives the interpreter lock away; getting it back costs one interval."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0002)
    yield
    sys.setswitchinterval(before)
