"""A check that a test leaves no thread and no descriptor behind."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import psutil
import pytest


@contextlib.contextmanager
def nothing_left_behind(seconds: float = 2.0) -> Iterator[None]:
    """Fails if, `seconds` after the end of the block, there are more threads or descriptors."""
    process = psutil.Process()
    threads, num_fds = set(threading.enumerate()), process.num_fds()
    yield
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if set(threading.enumerate()) <= threads and process.num_fds() <= num_fds:
            return
        time.sleep(0.01)
    left = set(threading.enumerate()) - threads
    pytest.fail(f"left behind: threads {left}, {process.num_fds() - num_fds} descriptors")
