"""Settings: what cannot work is refused where it is given, by name."""

from __future__ import annotations

import math

import pytest

from expertwire.config import ClientConfig, ServerConfig
from expertwire.errors import ConfigError

BAD_COUNTS = (0, -1, 1.5, True, "2", None)
BAD_TIMES = (0, -1.0, math.nan, math.inf, 1e6, "5", None)


@pytest.mark.parametrize("value", BAD_COUNTS)
@pytest.mark.parametrize("name", ["max_rows", "num_slots", "num_qps", "max_servers"])
def test_client_counts(name, value):
    with pytest.raises(ConfigError, match=name):
        ClientConfig(**{name: value})


@pytest.mark.parametrize("value", BAD_TIMES)
@pytest.mark.parametrize("name", ["connect_timeout", "reply_timeout", "missing_timeout"])
def test_client_times(name, value):
    if value is None and name != "connect_timeout":
        assert getattr(ClientConfig(), name) is None, "the default: adaptive"
        return
    with pytest.raises(ConfigError, match=name):
        ClientConfig(**{name: value})


@pytest.mark.parametrize("value", BAD_TIMES)
@pytest.mark.parametrize("name", ["idle_timeout", "reply_timeout"])
def test_server_times(name, value):
    with pytest.raises(ConfigError, match=name):
        ServerConfig(**{name: value})


@pytest.mark.parametrize("value", [v for v in BAD_COUNTS if v is not None])
def test_server_counts(value):
    for name in ("max_batch_rows", "max_connections", "max_slot_bytes", "num_threads"):
        with pytest.raises(ConfigError, match=name):
            ServerConfig(**{name: value})


@pytest.mark.parametrize("config", [ClientConfig, ServerConfig])
def test_spin_and_depth(config):
    for spin_us in (-1, math.nan, 1e9, "50"):
        with pytest.raises(ConfigError, match="spin_us"):
            config(spin_us=spin_us)
    for depth in (0, 15, 17, 1000, 65536, 64.0):
        with pytest.raises(ConfigError, match="queue_depth"):
            config(queue_depth=depth)


def test_choices():
    with pytest.raises(ConfigError, match="raise, drop, wait, not 'retry'"):
        ClientConfig(on_missing="retry")
    with pytest.raises(ConfigError, match="wait, raise, not 'drop'"):
        ClientConfig(on_full="drop")
    with pytest.raises(ConfigError, match="max_in_flight"):
        ClientConfig(max_in_flight=0)


def test_signal_mode():
    with pytest.raises(ConfigError, match="write, add, write_imm, not 'telepathy'"):
        ClientConfig(signal_mode="telepathy")
    ClientConfig(signal_mode="write_imm", num_slots=64)
    with pytest.raises(ConfigError, match="at most 64 num_slots, not 65"):
        ClientConfig(signal_mode="write_imm", num_slots=65)


def test_the_edges_are_allowed():
    ClientConfig(max_rows=1, num_slots=1, queue_depth=16, spin_us=0, reply_timeout=0.001)
    ServerConfig(queue_depth=32768, num_threads=1, idle_timeout=86_400)
