"""Registry, servers and clients on hosts of their own (network namespaces): addresses of every
kind, a host that is cut off in the middle, one that dies, loss and delay.

Minutes on a busy machine, so only with --ucx; without the right to make namespaces they then fail
and say so.
"""

from __future__ import annotations

import json
import secrets
import time

import pytest

from expertwire.demo import demo_model_path
from tests.ucx.hosts import Network, ip, read_until, why_not

pytestmark = pytest.mark.timeout(400)
CLIENT = "tests/ucx/steps_client.py"


@pytest.fixture(autouse=True, scope="module")
def _namespaces(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--ucx"):
        pytest.skip("hosts in network namespaces: with --ucx only")
    if reason := why_not():
        pytest.fail(reason)


HOSTS = ["registry", "one", "two", "client"]


@pytest.fixture
def net():
    with Network(HOSTS) as network:
        yield network


class Service:
    """A registry and two servers that hold every expert, each on its host."""

    def __init__(self, net: Network, family: str):
        self.net = net
        self.env = {"EXPERTWIRE_TOKEN": secrets.token_hex(16)}
        where = f"{net.address('registry', family)}:7700"
        args = ["-m", "expertwire", "registry", "--listen", where, "--lease", "3"]
        self.registry = net.popen("registry", args, self.env)
        read_until(self.registry, "listening on")
        self.address = where
        self.servers = {name: self.start(name) for name in ("one", "two")}
        for server in self.servers.values():
            read_until(server, "registry")

    def start(self, name: str):
        return self.net.popen(
            name, ["-m", "expertwire", "serve", demo_model_path(), "--experts", "all", "--name",
                   name, "--dtype", "float32", "--threads", "1", "--hca", "ucx", "--registry",
                   self.address], self.env,
        )

    def client(self):
        client = self.net.popen("client", [CLIENT, self.address, "2"], self.env)
        read_until(client, "connected")
        read_until(client, "serving one,two")
        return client

    def finish(self, client) -> dict:
        """What the client saw; it checked every result."""
        client.stdin.write("\n")
        client.stdin.close()
        facts = json.loads(read_until(client, "{"))
        assert client.wait(20) == 0
        return facts


@pytest.mark.parametrize("family", ["ipv4", "ipv6", "link-local"])
def test_hosts_work_together(family):
    """Where the address is an IPv6 one the hosts have no other, so the data goes that way too."""
    with Network(HOSTS, ipv4=family == "ipv4") as net:
        service = Service(net, family)
        client = service.client()
        time.sleep(1.0)
        facts = service.finish(client)
    assert facts["steps"] > 10 and facts["retries"] == 0, facts


LISTENS = """
import psutil
from expertwire.hca.ucx import UcxHca
with UcxHca(thread=False, local_address="10.77.1.1"):
    print({entry.laddr.ip for entry in psutil.Process().net_connections("tcp")})
"""


def test_an_address_with_a_label_is_found():
    """getifaddrs gives the label, "eth0:more", instead of the device's name."""
    with Network(["one"]) as net:
        ip("-n", net.space("one"), "addr", "add", "10.77.1.1/24", "dev", "eth0", "label",
           "eth0:more")
        process = net.popen("one", ["-c", LISTENS], {})
        # UCX takes the first address of the device.
        assert read_until(process, "{") == "{'10.77.0.1'}"
        assert process.wait(20) == 0


def test_host_that_is_cut_off_loses_no_token_and_comes_back(net):
    service = Service(net, "ipv4")
    client = service.client()
    net.cut("one")
    read_until(client, "serving two")
    time.sleep(0.5)
    net.mend("one")
    read_until(client, "serving one,two")
    net.cut("two")
    read_until(client, "serving one")
    facts = service.finish(client)
    assert facts["retries"] >= 1, facts
    # One deadline, which a busy machine makes longer, not a keepalive of many seconds.
    assert facts["longest"] < 10, facts


def test_server_that_dies_on_another_host(net):
    service = Service(net, "ipv4")
    client = service.client()
    service.servers["one"].kill()
    read_until(client, "serving two")
    service.servers["one"] = service.start("one")
    read_until(client, "serving one,two")
    facts = service.finish(client)
    assert facts["longest"] < 10, facts


def test_client_host_that_is_cut_off_does_not_keep_its_place(net):
    """The servers let go of it, and serve others."""
    service = Service(net, "ipv4")
    client = service.client()
    net.cut("client")
    time.sleep(0.5)
    client.kill()
    client.wait(10)
    other = net.popen("registry", [CLIENT, service.address, "2"], service.env)
    read_until(other, "serving one,two")
    assert service.finish(other)["steps"] > 0


def test_loss_and_delay(net):
    service = Service(net, "ipv4")
    client = service.client()
    try:
        with net.netem("one", "delay", "2ms", "1ms", "loss", "2%"):
            time.sleep(3.0)
    except OSError as err:
        pytest.skip(f"this kernel has no netem: {err}")
    facts = service.finish(client)
    assert facts["steps"] > 10, facts
