"""Addresses of data connections, and of everything else: names, ports, IPv4, IPv6 with zones."""

from __future__ import annotations

import socket

import pytest

from expertwire.config import ClientConfig, ServerConfig
from expertwire.control.data_address import (
    TcpListener,
    connect_data,
    listen_data,
    local_host_towards,
    parse_listen,
    with_zone,
)
from expertwire.control.frames import format_address, parse_address
from expertwire.errors import ConfigError, WaitTimeout

TOKEN = b"x" * 32


class Here:
    network, scheme = False, ""


class Behind:
    network, scheme = True, "ucx"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.1:7700", ("10.0.0.1", 7700)),
        ("node-7.rack.example:0", ("node-7.rack.example", 0)),
        ("[2001:db8::7]:7700", ("2001:db8::7", 7700)),
        ("[fe80::1%eth0]:7700", ("fe80::1%eth0", 7700)),
        ("[FE80::1%Eth0.2]:1", ("fe80::1%Eth0.2", 1)),
    ],
)
def test_addresses_are_taken_apart(text, expected):
    assert parse_address(text) == expected
    assert parse_address(format_address(*expected)) == expected


@pytest.mark.parametrize(
    "text",
    ["user@host:1", "host:1/path", "host:1?x", "host:1#x", "[10.0.0.1]:1", "[::1%]:1", "[::1]]:1",
     "fe80::1%eth0:1", "host:1 ", "//host:1", "[::1]:", "[::1", "ho\nst:1", "host:\t1"],
)
def test_what_is_no_address_is_one_clear_error(text):
    with pytest.raises(ConfigError):
        parse_address(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("10.0.0.1", ("10.0.0.1", 0)), ("::1", ("::1", 0)), ("host:5", ("host", 5)),
     ("host", ("host", 0)), ("[::]:9", ("::", 9)), ("fe80::2%eth1", ("fe80::2%eth1", 0))],
)
def test_listen_addresses_need_no_port(text, expected):
    assert parse_listen(text) == expected


@pytest.mark.parametrize(
    ("server", "registry", "expected"),
    [
        ("[fe80::2]:5", "[fe80::1%eth3]:7700", "[fe80::2%eth3]:5"),
        ("[fe80::2%theirs]:5", "[fe80::1%ours]:7700", "[fe80::2%ours]:5"),
        ("[fe80::2%eth0]:5", "10.0.0.1:7700", "[fe80::2%eth0]:5"),
        ("[2001:db8::2]:5", "[fe80::1%eth3]:7700", "[2001:db8::2]:5"),
        ("10.0.0.2:5", "[fe80::1%eth3]:7700", "10.0.0.2:5"),
        ("host:5", "[fe80::1%eth3]:7700", "host:5"),
    ],
)
def test_zone_is_this_sides(server, registry, expected):
    assert with_zone(server, registry) == expected


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_listener_is_reached_at_the_address_it_tells(host):
    if host == "::1" and not has_ipv6():
        pytest.skip("this host has no IPv6 loopback address")
    listener = TcpListener(host, 0, TOKEN)
    try:
        assert listener.address.startswith("ucx://")
        channel = connect_data(Behind(), listener.address, TOKEN, 5)
        accepted = listener.accept(5)
        channel.send({"hello": 1})
        assert accepted.recv(5) == ({"hello": 1}, [])
        channel.close()
        accepted.close()
    finally:
        listener.close()


def test_wildcard_is_told_as_the_address_towards_the_registry():
    listener = listen_data("ucx", "0.0.0.0", "127.0.0.1:7700", TOKEN)
    try:
        assert listener.address.startswith("ucx://127.0.0.1:")
    finally:
        listener.close()


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6 loopback address")
@pytest.mark.parametrize("registry", ["127.0.0.1:7700", "[::1]:7700"])
def test_ipv6_wildcard_is_reached_at_what_it_tells_of_either_kind(registry):
    listener = listen_data("ucx", "[::]:0", registry, TOKEN)
    try:
        channel = connect_data(Behind(), listener.address, TOKEN, 5)
        listener.accept(5).close()
        channel.close()
    finally:
        listener.close()


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6 loopback address")
def test_ipv4_wildcard_with_an_ipv6_registry_is_refused():
    with pytest.raises(ConfigError, match=r"takes IPv4 only.*::1.*use \[::\]"):
        listen_data("ucx", "0.0.0.0", "[::1]:7700", TOKEN)


def test_taken_port_is_a_clear_error():
    first = TcpListener("127.0.0.1", 0, TOKEN)
    port = first.address.rpartition(":")[2]
    try:
        with pytest.raises(ConfigError, match="--data-listen"):
            TcpListener("127.0.0.1", int(port), TOKEN)
    finally:
        first.close()


def test_no_way_to_the_registry_names_the_option():
    with pytest.raises(ConfigError, match="--data-listen"):
        local_host_towards("name.that.does.not.exist.invalid:7700")


def test_each_hca_says_which_servers_it_cannot_reach():
    with pytest.raises(ConfigError, match="--hca ucx"):
        connect_data(Here(), "ucx://127.0.0.1:1", TOKEN, 1)
    with pytest.raises(ConfigError, match="--hca mlx5:<device>"):
        connect_data(Behind(), "mlx5://127.0.0.1:1", TOKEN, 1)
    with pytest.raises(ConfigError, match=r"own host only.*--hca ucx"):
        connect_data(Behind(), "expertwire-0123", TOKEN, 1)


def test_closed_port_and_black_hole_end_within_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = taken.getsockname()[1]
    for address in (f"ucx://127.0.0.1:{closed}", "ucx://192.0.2.1:9"):
        with pytest.raises(WaitTimeout, match="is the server still there"):
            connect_data(Behind(), address, TOKEN, 0.5)


def test_peer_that_accepts_and_says_nothing_ends_within_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"ucx://127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(WaitTimeout, match="did not finish the handshake"):
            connect_data(Behind(), address, TOKEN, 0.5)


def test_settings_that_exclude_each_other():
    with pytest.raises(ConfigError, match="do_ibgda"):
        ClientConfig(hca="ucx", do_ibgda=False)
    with pytest.raises(ConfigError, match="listen"):
        ServerConfig(listen="10.0.0.1")
    for config in (ClientConfig, ServerConfig):
        with pytest.raises(ConfigError, match="hca"):
            config(hca="carrier pigeon")
