"""Where UCX listens: at the address that this side was told to use, and nowhere else."""

from __future__ import annotations

import ipaddress
import socket

import psutil
import pytest

from expertwire.control.data_address import TcpListener, own_data_host
from expertwire.errors import HcaError
from expertwire.hca.ucx import UcxHca
from tests.system.cluster import cluster, model_facts
from tests.ucx.test_service import SERVER, check


@pytest.fixture(autouse=True)
def _no_choice_of_the_user(monkeypatch):
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)


def listens_at() -> set[str]:
    """The addresses of this process's listening TCP sockets."""
    found = psutil.Process().net_connections(kind="tcp")
    return {entry.laddr.ip for entry in found if entry.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_ucx_listens_at_the_given_address_alone(address):
    if address == "::1":
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError as err:
            pytest.skip(f"no IPv6 loopback here: {err}")
    before = listens_at()
    with UcxHca(local_address=address):
        assert listens_at() - before == {address}
    assert listens_at() == before


def test_an_address_of_another_host_is_refused():
    with pytest.raises(HcaError, match=r"no network device here has the address 192\.0\.2\.77"):
        UcxHca(local_address="192.0.2.77")


def test_the_users_own_choice_goes_first(monkeypatch):
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    with UcxHca(local_address="192.0.2.77"):
        assert "127.0.0.1" in listens_at()


def test_nothing_of_a_service_on_loopback_is_reached_from_elsewhere():
    """Server, client, registry and UCX of both, in this process."""
    model = model_facts()
    with cluster([range(8)], model, server_options=SERVER, hca="ucx") as (client, _, _):
        check(client, model, 5)
        assert listens_at() and all(ipaddress.ip_address(at).is_loopback for at in listens_at())


def test_the_data_goes_over_what_the_listener_is_bound_to():
    for host, expected in (("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("0.0.0.0", "")):
        listener = TcpListener(host, 0, b"secret of a test", shown="127.0.0.1")
        try:
            assert listener.data_host == expected or (host, listener.data_host) == (
                "localhost", "::1")
        finally:
            listener.close()
    assert own_data_host("ucx", "127.0.0.1:7700") == "127.0.0.1"
    assert own_data_host("soft", "not-a-name.invalid:1") == ""
