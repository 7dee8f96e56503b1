"""A wrong token: said once, at once, in words that help."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time

import pytest
import torch
from tests.system.cluster import TOKEN

from expertwire import Client, Registry
from expertwire.demo import demo_model_path
from expertwire.errors import AuthError

OTHER = b"another-token-0123456789"


def test_a_client_is_told_at_once(caplog):
    with Registry(token=TOKEN) as registry, Client(registry, token=OTHER) as client:
        begin = time.monotonic()
        with pytest.raises(AuthError, match="EXPERTWIRE_TOKEN") as caught:
            client.wait_ready(30)
        with pytest.raises(AuthError):
            client.moe(0, torch.zeros(1, 4), torch.zeros(1, 1, dtype=torch.int64),
                       torch.zeros(1, 1))
        assert time.monotonic() - begin < 5
        assert "expertwire serve" not in str(caught.value)
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert not warnings, [r.getMessage() for r in warnings]


def test_commands_say_it_once():
    with Registry(token=TOKEN) as registry:
        done = subprocess.run(
            [sys.executable, "-m", "expertwire", "generate", demo_model_path(), "x", "--registry",
             registry.address], capture_output=True, text=True, timeout=100, check=False,
            env={**os.environ, "EXPERTWIRE_TOKEN": OTHER.decode()},
        )
    assert done.returncode == 1
    assert done.stderr.count("different tokens") == 1, done.stderr
    assert "trying again" not in done.stderr and "start one with" not in done.stderr
    assert "Traceback" not in done.stderr
