"""`expertwire serve --device`: what is no device, or not there, is said before loading anything."""

from __future__ import annotations

import pytest

from expertwire.errors import ConfigError
from expertwire.serve import make_server, parse_device


def test_the_cpu():
    assert parse_device("cpu") is None


@pytest.mark.parametrize(("text", "problem"), [
    ("cuda:64", r"torch sees \d+ GPUs here"), ("mps", r"torch sees \d+ GPUs here"),
    ("cuda:x", "it is cpu, cuda or cuda:N"), ("toaster", "it is cpu, cuda or cuda:N"),
    ("", "it is cpu, cuda or cuda:N"),
])
def test_what_is_not_there(text, problem):
    with pytest.raises(ConfigError, match=f"--device '{text}': {problem}"):
        parse_device(text)


def test_before_the_model_is_looked_at():
    from expertwire.config import ServerConfig

    with pytest.raises(ConfigError, match="--device 'cuda:64'"):
        make_server("/no/such/folder", "all", "127.0.0.1:1", name=None, dtype=None,
                    token=b"sixteen bytes or more", num_auto_servers=None, config=ServerConfig(),
                    device="cuda:64")
