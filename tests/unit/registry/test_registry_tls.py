"""TLS between the registry and everybody else: who is refused, and that nothing else changes."""

from __future__ import annotations

import shutil
import socket
import ssl
import threading
import time
from pathlib import Path

import pytest
from tests.followers import Follower
from tests.registry_peers import TOKEN, Peer, ends, server_facts

from expertwire.control import frames as control
from expertwire.control import tls
from expertwire.control.channel import Channel
from expertwire.errors import AuthError, ConfigError, ExpertwireError, ProtocolError, WaitTimeout
from expertwire.registry import registry
from expertwire.registry.membership import Lease, ask
from expertwire.registry.registry import Registry

SHIPPED = Path(__file__).parents[2] / "tls"


@pytest.fixture
def files(tmp_path):
    """name -> path; keys as private as they have to be."""
    for file in SHIPPED.iterdir():
        shutil.copy(file, tmp_path)
        (tmp_path / file.name).chmod(0o600)
    return tmp_path


@pytest.fixture
def secure(files, monkeypatch):
    """A registry over TLS, and an environment that trusts it."""
    monkeypatch.setenv(tls.CA, str(files / "ca.pem"))
    with started(files, "registry") as running:
        yield running


def started(files: Path, name: str, **options) -> Registry:
    return Registry(token=TOKEN, handshake_seconds=0.6, tls_cert=str(files / f"{name}.pem"),
                    tls_key=str(files / f"{name}.key"), **options)


def test_servers_clients_and_questions_work_over_tls(secure):
    lease = Lease(secure.address, TOKEN, server_facts("a"))
    try:
        assert lease.wait_registered(5) == "a"
        with Follower(secure.address) as follower:
            assert follower.wait({"a"}).servers[0].experts == (0, 1)
            assert ask(secure.address, TOKEN, {"type": "status"})["clients"] == ["follower"]
            peer = Peer(secure.address)
            peer.register("b")
            follower.wait({"a", "b"})
            peer.close()
            follower.wait({"a"})
    finally:
        lease.close()


def test_large_messages_both_ways_and_from_two_threads(secure):
    peer = Peer(secure.address)
    big = server_facts("big")
    big["model"] = {**big["model"], "remark": "x" * 800_000}
    assert peer.ask("register", **big)["type"] == "registered"
    stop = threading.Event()

    def beat() -> None:
        while not stop.is_set():
            peer.channel.send({"type": "heartbeat", "stats": {"y": "z" * 20_000}})

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        for _ in range(40):
            assert peer.channel.recv(5)[0]["type"] == "alive"
    finally:
        stop.set()
        thread.join(5)
    asker = Peer(secure.address)
    assert asker.ask("status")["servers"][0]["model"]["remark"] == "x" * 800_000
    peer.close()
    asker.close()


@pytest.mark.parametrize("name, why", [
    ("forged", "self-signed|unable to get local issuer"), ("expired", "expired"),
    ("elsewhere", "not valid for"),
])
def test_a_registry_with_a_bad_certificate_is_refused(files, monkeypatch, name, why):
    monkeypatch.setenv(tls.CA, str(files / "ca.pem"))
    with started(files, name) as running, pytest.raises(AuthError, match=why):
        control.connect_tcp(running.address, TOKEN, 3)


def test_the_token_is_still_needed(secure):
    with pytest.raises(AuthError, match="different tokens"):
        control.connect_tcp(secure.address, b"another-token-0123456789", 3)


def test_without_tls_at_one_side_only(secure, monkeypatch):
    monkeypatch.delenv(tls.CA)
    with pytest.raises((WaitTimeout, ProtocolError)) as caught:
        control.connect_tcp(secure.address, TOKEN, 1.5)
    if isinstance(caught.value, WaitTimeout):
        assert "EXPERTWIRE_TLS_CA" in str(caught.value)
    monkeypatch.setenv(tls.CA, str(SHIPPED / "ca.pem"))
    with Registry(token=TOKEN, handshake_seconds=0.6) as plain, pytest.raises(
        ProtocolError, match="EXPERTWIRE_TLS_CERT"
    ):
        control.connect_tcp(plain.address, TOKEN, 3)


def test_old_tls_is_refused(secure, files):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(files / "ca.pem")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    host, port = control.parse_address(secure.address)
    with socket.create_connection((host, port), 3) as sock, pytest.raises(ssl.SSLError):
        context.wrap_socket(sock, server_hostname=host)


def raw(reg: Registry) -> socket.socket:
    return socket.create_connection(control.parse_address(reg.address), timeout=3)


@pytest.mark.parametrize("first", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 900])
def test_strangers_end_by_the_deadline_and_block_nobody(secure, first):
    stalled = [raw(secure) for _ in range(20)]
    for sock in stalled:
        sock.sendall(first)
    begin = time.monotonic()
    assert ask(secure.address, TOKEN, {"type": "status"})["servers"] == []
    assert all(ends(sock) for sock in stalled)
    assert time.monotonic() - begin < 3


def test_half_open_tls_handshakes_count_as_handshakes(secure, monkeypatch):
    monkeypatch.setattr(registry, "MAX_HANDSHAKES", 4)
    monkeypatch.setattr(control, "SLOW_HANDSHAKE_SECONDS", 0.05)
    secure.handshake_seconds = 30.0
    stalled = [raw(secure) for _ in range(4)]
    time.sleep(0.15)
    assert ask(secure.address, TOKEN, {"type": "status"})["servers"] == []
    assert sum(ends(sock) for sock in stalled[:1]) == 1, "the oldest made room"
    for sock in stalled[1:]:
        sock.close()


def test_a_stalled_registry_is_given_up_in_time(files, monkeypatch):
    monkeypatch.setenv(tls.CA, str(files / "ca.pem"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        begin = time.monotonic()
        with pytest.raises(WaitTimeout, match="TLS handshake"):
            control.connect_tcp(address, TOKEN, 0.4)
        assert time.monotonic() - begin < 2


def test_closing_wakes_a_thread_that_receives(secure):
    channel = control.connect_tcp(secure.address, TOKEN, 3)
    seen: list[BaseException] = []

    def receive() -> None:
        try:
            channel.recv(None)
        except ExpertwireError as err:
            seen.append(err)

    thread = threading.Thread(target=receive)
    thread.start()
    time.sleep(0.05)
    channel.close()
    thread.join(3)
    assert not thread.is_alive() and isinstance(seen[0], ProtocolError)
    assert isinstance(channel, Channel)


def test_files_that_cannot_be_used(files, monkeypatch):
    cert, key = str(files / "registry.pem"), str(files / "registry.key")
    with pytest.raises(ConfigError, match="both"):
        Registry(token=TOKEN, tls_cert=cert)
    with pytest.raises(ConfigError, match="cannot use"):
        Registry(token=TOKEN, tls_cert=cert, tls_key=str(files / "forged.key"))
    with pytest.raises(ConfigError, match="cannot use"):
        Registry(token=TOKEN, tls_cert=str(files / "none.pem"), tls_key=key)
    Path(key).chmod(0o640)
    with pytest.raises(AuthError, match="chmod 600"):
        Registry(token=TOKEN, tls_cert=cert, tls_key=key)
    for ca in (files / "none.pem", files / "registry.key"):
        monkeypatch.setenv(tls.CA, str(ca))
        with pytest.raises(ConfigError, match="EXPERTWIRE_TLS_CA"):
            control.connect_tcp("127.0.0.1:1", TOKEN, 1)


def test_the_environment_and_the_command_line_name_the_files(files, monkeypatch):
    from expertwire.cli.app import tls_files

    for name in (tls.CERT, tls.KEY, tls.CA):
        monkeypatch.setenv(name, "")
    assert tls.server_context() is None and tls.client_context() is None
    tls_files(tls_cert=str(files / "registry.pem"), tls_key=str(files / "registry.key"),
              tls_ca=str(files / "ca.pem"))
    with Registry(token=TOKEN) as running:
        assert ask(running.address, TOKEN, {"type": "status"})["servers"] == []
