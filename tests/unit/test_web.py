"""The small HTTP server, and what it refuses."""

from __future__ import annotations

import http.client
import socket
import threading
import time

import pytest

from expertwire.errors import ConfigError
from expertwire.observe.web import MAX_CONNECTIONS, WebServer, listen_address, names_an_address


@pytest.fixture
def web():
    def broken(accept):
        raise RuntimeError("a secret of the process")

    routes = {"/": lambda accept: ("text/html", b"<p>hello</p>"), "/broken": broken,
              "/accept": lambda accept: ("text/plain", accept.encode())}
    with WebServer("127.0.0.1:0", routes) as made:
        yield made


def ask(web, method="GET", path="/", **headers):
    host, port = web.address.rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    try:
        connection.request(method, path, headers={k.replace("_", "-"): v
                                                  for k, v in headers.items()})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_a_page_with_headers_that_let_nothing_else_in(web):
    status, headers, body = ask(web)
    assert (status, body) == (200, b"<p>hello</p>")
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
    assert "frame-ancestors 'none'" in policy and "form-action 'none'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert headers["Server"] == "expertwire", "no versions"
    assert "Access-Control-Allow-Origin" not in headers


def test_only_what_is_there_and_only_to_look(web):
    assert ask(web, path="/nothing")[0] == 404
    assert ask(web, path="/../etc/passwd")[0] == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "CONNECT"):
        assert ask(web, method)[0] == 501, method
    status, headers, body = ask(web, "HEAD")
    assert (status, body, headers["Content-Length"]) == (200, b"", "12")
    assert ask(web, path="/?now=1")[2] == b"<p>hello</p>"


def test_a_route_that_fails_tells_nothing(web):
    status, _, body = ask(web, path="/broken")
    assert (status, body) == (503, b"try again\n")
    assert ask(web)[0] == 200


@pytest.mark.parametrize(("host", "status"), [
    ("127.0.0.1", 200), ("localhost:8000", 200), ("[::1]:7", 200), ("10.0.0.7:80", 200),
    ("evil.example", 403), ("evil.example:80", 403), ("", 403), ("127.0.0.1.evil.example", 403),
])
def test_names_that_point_here_are_refused_on_a_private_address(web, host, status):
    """DNS rebinding: a page elsewhere must not read this one through its visitor's browser."""
    assert ask(web, Host=host)[0] == status


def test_addresses_in_host_headers():
    assert names_an_address("[fe80::1]") and names_an_address("1.2.3.4")
    assert not names_an_address("a:b") and not names_an_address("1.2.3.4.5")


def test_a_client_that_says_nothing_holds_nobody_up(web):
    host, port = web.address.rsplit(":", 1)
    silent = [socket.create_connection((host, int(port))) for _ in range(3)]
    begin = time.monotonic()
    assert ask(web)[0] == 200
    assert time.monotonic() - begin < 4
    for connection in silent:
        connection.close()


def test_connections_are_bounded(web):
    host, port = web.address.rsplit(":", 1)
    before = threading.active_count()
    many = [socket.create_connection((host, int(port))) for _ in range(MAX_CONNECTIONS + 20)]
    deadline = time.monotonic() + 10
    while threading.active_count() - before < MAX_CONNECTIONS and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threading.active_count() - before <= MAX_CONNECTIONS
    for connection in many:
        connection.close()
    while time.monotonic() < deadline:
        try:
            if ask(web)[0] == 200:
                return
        except (OSError, http.client.HTTPException):
            time.sleep(0.05)
    raise AssertionError("it does not answer any more")


def test_garbage_is_answered_or_dropped(web):
    host, port = web.address.rsplit(":", 1)
    for junk in (b"\x16\x03\x01\x00\xa5", b"GET / HTTP/9.9\r\n\r\n", b"GET " + b"a" * 70000,
                 b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 200 + b"\r\n"):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(junk)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            try:
                while data := connection.recv(4096):
                    answer += data
            except ConnectionError:
                pass
            assert b"hello" not in answer
    assert ask(web)[0] == 200


def test_it_ends_at_once_with_readers_connected(web):
    host, port = web.address.rsplit(":", 1)
    with socket.create_connection((host, int(port))):
        begin = time.monotonic()
        web.close()
        assert time.monotonic() - begin < 3


def test_an_address_that_is_taken_or_malformed(web):
    with pytest.raises(ConfigError, match="cannot listen on"):
        WebServer(web.address, {})
    with pytest.raises(ConfigError, match="PORT"):
        WebServer("nowhere", {})


@pytest.mark.parametrize(("text", "host", "full"), [
    ("9090", "127.0.0.1", "127.0.0.1:9090"), ("0.0.0.0:1", "127.0.0.1", "0.0.0.0:1"),
    ("0", "::1", "[::1]:0"),
])
def test_where_to_listen(text, host, full):
    assert listen_address(text, host) == full


@pytest.mark.parametrize("text", ["x", "99999", "", "a:b:1"])
def test_where_nobody_can_listen(text):
    with pytest.raises(ConfigError):
        listen_address(text, "127.0.0.1")
