"""Servers as processes of their own that are killed or stopped, and what clients keep meanwhile."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from tests.leftovers import nothing_left_behind

from expertwire.errors import WaitTimeout
from expertwire.registry.membership import Lease, Members, Membership
from expertwire.registry.registry import Registry

MODEL = {"fingerprint": "f-1", "name": "tiny", "num_experts": 2, "dtype": "float32"}
SERVER = (
    "import sys, time; from expertwire.registry.membership import Lease; "
    "lease = Lease(sys.argv[1], sys.argv[2].encode(), {'name': 'k', 'address': 'x', 'pid': 1, "
    "'model': {'fingerprint': 'f-1', 'name': 'tiny', 'num_experts': 2, 'dtype': 'float32'}, "
    "'experts': [0]}); "
    "time.sleep(60)"
)


@pytest.fixture(autouse=True)
def _clean():
    with nothing_left_behind():
        yield


@contextlib.contextmanager
def server_process(address: str, token: bytes) -> Iterator[subprocess.Popen]:
    child = subprocess.Popen([sys.executable, "-c", SERVER, address, token.decode()])
    try:
        yield child
    finally:
        child.kill()
        child.wait(5)


def test_kill_9_is_noticed_in_less_than_a_second(token):
    with (
        Registry(token=token) as registry,
        contextlib.closing(Membership(registry.address, token)) as members,
        server_process(registry.address, token) as child,
    ):
        members.wait(lambda m: len(m.servers) == 1, 20)
        begin = time.monotonic()
        child.send_signal(signal.SIGKILL)
        members.wait(lambda m: not m.servers, 5)
        assert time.monotonic() - begin < 1


def test_a_server_stopped_beyond_its_lease_comes_back_by_itself(token):
    with (
        Registry(token=token, lease_seconds=0.6) as registry,
        contextlib.closing(Membership(registry.address, token)) as members,
        server_process(registry.address, token) as child,
    ):
        (first,) = members.wait(lambda m: len(m.servers) == 1, 20).servers
        child.send_signal(signal.SIGSTOP)
        members.wait(lambda m: not m.servers, 10)
        child.send_signal(signal.SIGCONT)
        (again,) = members.wait(lambda m: len(m.servers) == 1, 10).servers
        assert (again.server_id, again.seat) == (first.server_id, first.seat)
        assert again.epoch_joined > first.epoch_joined


def test_the_last_list_stays_while_a_new_registry_waits_for_its_servers(token):
    """No server comes back here: whatever clients see is what they kept. The epoch still grows,
    by what the client alone has seen."""
    facts = {"name": "a", "address": "x", "pid": 1, "model": MODEL, "experts": [0]}
    with contextlib.ExitStack() as stack:
        registry = stack.enter_context(Registry(token=token))
        members = Membership(registry.address, token)
        stack.callback(members.close)
        lease = Lease(registry.address, token, facts)
        before = members.wait(lambda m: len(m.servers) == 1, 5)
        registry.close()
        lease.close()
        again = Registry(registry.address, token=token, settle_seconds=60)
        again.roster.epoch = 1  # as if the clock had been set back
        stack.enter_context(again)
        after = members.wait(lambda m: m.epoch > before.epoch, 8)
        assert after.servers == before.servers


def test_a_list_of_an_older_epoch_is_not_taken(token):
    with Registry(token=token) as registry:
        members = Membership(registry.address, token)
        epoch = members.wait(lambda m: m.epoch > 0, 5).epoch
        members.close()
    for given, expected in ((epoch - 1, epoch), (epoch + 1, epoch + 1)):
        members._take({"epoch": given, "servers": [], "instance": "another"})
        assert members.snapshot() == Members(expected)


def test_failures_are_logged_once_and_hold_no_secret(token, caplog):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with (
        caplog.at_level(logging.DEBUG, logger="expertwire"),
        contextlib.closing(Membership(address, token)) as members,
        pytest.raises(WaitTimeout, match="nothing answers"),
    ):
        members.wait(lambda m: bool(m.servers), 0.8)
    assert len([r for r in caplog.records if "nothing answers" in r.getMessage()]) == 1
    assert token.decode() not in caplog.text
