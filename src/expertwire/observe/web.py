"""A small HTTP server for looking: GET and HEAD of fixed paths, no state, nothing from outside.

There is no authentication: whoever reaches the address may read, and nobody can change anything.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ..control.channel import format_address, parse_address
from ..errors import ConfigError

log = logging.getLogger("expertwire.observe.web")

MAX_CONNECTIONS = 32
SOCKET_SECONDS = 5.0  # for a request, and between two parts of it
# (accept header) -> (content type, body)
Route = Callable[[str], tuple[str, bytes]]

HEADERS = {
    # Scripts and styles come from here, nothing else may load, frame or be posted to.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
                               "connect-src 'self'; img-src 'self'; base-uri 'none'; "
                               "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class WebServer:
    """Serves `routes` from background threads until it is closed.

        with WebServer("127.0.0.1:0", {"/": lambda accept: ("text/plain", b"hello")}) as web:
            print(web.address)

    Raises ConfigError for a malformed address, or one that cannot be listened on.
    """

    def __init__(self, listen: str, routes: Mapping[str, Route]):
        host, port = parse_address(listen)
        try:
            self._server = _Server((host, port), routes)
        except OSError as err:
            raise ConfigError(
                f"cannot listen on {listen}: {err.strerror or err}; choose another port, or stop "
                "what is using it"
            ) from None
        host, port = self._server.server_address[:2]
        self.address = format_address(str(host), int(port))
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="expertwire-web", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stops listening and drops the connections. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(2)

    def __enter__(self) -> WebServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, address: tuple[str, int], routes: Mapping[str, Route]):
        self.routes = routes
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._open: set[socket.socket] = set()
        super().__init__(address, _Handler)
        self.is_private = is_loopback(str(self.server_address[0]))

    def server_bind(self) -> None:
        # Not HTTPServer's: it looks the address up in the DNS, which may take long.
        if self.allow_reuse_address:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request, client_address) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)  # the browser tries again
            return
        self._open.add(request)
        super().process_request(request, client_address)

    def process_request_thread(self, request, client_address) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._open.discard(request)
            self._room.release()

    def server_close(self) -> None:
        super().server_close()
        for request in list(self._open):
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request, client_address) -> None:
        log.debug("a request of %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # ty: ignore[incompatible-mutable-override]
    timeout = SOCKET_SECONDS
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        route = self.server.routes.get(self.path.split("?")[0])
        if self.server.is_private and not names_an_address(self.headers.get("Host", "")):
            # A page elsewhere whose name was made to point here (DNS rebinding) is no visitor.
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"name this host by its address\n")
        elif route is None:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there is nothing here\n")
        else:
            try:
                kind, body = route(self.headers.get("Accept", ""))
            except Exception:
                log.exception("GET %s", self.path.split("?")[0])
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", b"try again\n")
            else:
                self._answer(HTTPStatus.OK, kind, body)

    do_HEAD = do_GET

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        charset = "" if "charset" in kind else "; charset=utf-8"
        self.send_header("Content-Type", kind + charset)
        self.send_header("Content-Length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def version_string(self) -> str:
        return "expertwire"

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def names_an_address(header: str) -> bool:
    """Whether a Host header is an IP address or localhost, with or without a port."""
    host = header.rpartition(":")[0] if ":" in header.rpartition("]")[2] else header
    host = host.removeprefix("[").removesuffix("]")
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def listen_address(text: str, host: str) -> str:
    """[HOST:]PORT with a default for the host. Raises ConfigError."""
    full = text if ":" in text else f"{f'[{host}]' if ':' in host else host}:{text}"
    parse_address(full)
    return full
