"""Where a server takes data connections, as the registry passes it on, and how to get there.

On one host it is the name of a Unix socket (frames.py). With an HCA for other hosts it is
`ucx://HOST:PORT` or `mlx5://HOST:PORT`, a TCP socket that only the handshake goes over; it stays
open, and its end tells each side that the other one is gone. The data goes through the HCA.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import urllib.parse

from ..errors import ConfigError
from ..hca.interface import Hca
from .channel import Channel, format_address, parse_address
from .frames import (
    ACCEPT_SECONDS,
    Listener,
    connect_tcp,
    connect_unix,
    listen_unix,
    set_tcp_options,
)

SCHEMES = ("ucx", "mlx5")


class TcpListener(Listener):
    """For processes of other hosts that know the token.

    host, port: what to listen on; port 0 picks a free one. `address` is what peers are told, with
    `shown` for the host where it is another one.
    """

    def __init__(
        self, host: str, port: int, token: bytes, shown: str = "",
        handshake_seconds: float = ACCEPT_SECONDS, *, scheme: str = "ucx",
    ):
        try:
            family, _, _, _, place = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            # "::" takes IPv4, too: the address that is shown may be of either kind.
            both = place[0] == "::" and socket.has_dualstack_ipv6()
            sock = socket.create_server(place, family=family, dualstack_ipv6=both)
        except OSError as err:
            raise ConfigError(
                f"cannot listen on {format_address(host, port)}: {err.strerror or err}; choose "
                "another --data-listen"
            ) from None
        address = format_address(shown or host, sock.getsockname()[1])
        bound = socket.getnameinfo(sock.getsockname(), socket.NI_NUMERICHOST)[0]
        everywhere = ipaddress.ip_address(bound).is_unspecified
        super().__init__(sock, f"{scheme}://{address}", token, handshake_seconds)
        self.data_host = "" if everywhere else bound

    def _may_speak(self, sock: socket.socket) -> bool:
        set_tcp_options(sock)
        return True


def listen_data(hca: str, listen: str | None, registry: str, token: bytes) -> Listener:
    """The listener of a server with that HCA. listen: HOST:PORT or HOST; None: the address
    of this host that the registry is reached from. Raises ConfigError."""
    scheme = hca.partition(":")[0]
    if scheme not in SCHEMES:
        return listen_unix(token)
    if listen is None:
        return TcpListener(local_host_towards(registry), 0, token, scheme=scheme)
    host, port = parse_listen(listen)
    # A wildcard is a place to listen, not one to connect to.
    wildcard = is_address(host) and ipaddress.ip_address(host).is_unspecified
    shown = local_host_towards(registry) if wildcard else ""
    if shown and ":" in shown and ":" not in host:
        raise ConfigError(f"--data-listen {listen} takes IPv4 only, and the registry is reached "
                          f"with IPv6 ({shown}): use [::], or name an address")
    return TcpListener(host, port, token, shown, scheme=scheme)


def parse_listen(text: str) -> tuple[str, int]:
    """HOST:PORT, or HOST (IPv6 in brackets or not) for any free port. Raises ConfigError."""
    if is_address(text):
        return text, 0
    try:
        return parse_address(text)
    except ConfigError:
        return parse_address(f"{text}:0")


def is_address(host: str) -> bool:
    """Whether it is an IP address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def local_host_towards(registry: str) -> str:
    """The address of this host that packets to the registry leave with; none is sent. Raises
    ConfigError where there is no way."""
    host, port = parse_address(registry)
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port or 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return socket.getnameinfo(probe.getsockname(), socket.NI_NUMERICHOST)[0]
    except OSError as err:
        raise ConfigError(
            f"no way to the registry at {registry} ({err.strerror or err}), so it is not known "
            "which address of this host others should use: a server's --data-listen HOST names it"
        ) from None


def own_data_host(hca: str, registry: str) -> str:
    """The address of this host that a client's data goes over: the one that the registry is
    reached from; "" where data stays on the host. Raises ConfigError if there is no way there."""
    return local_host_towards(registry) if hca.partition(":")[0] == "ucx" else ""


def connect_data(
    hca: Hca, address: str, token: bytes, timeout: float,
    stopped: threading.Event | None = None, registry: str = "",
) -> Channel:
    """An authenticated channel to a server at the address that the registry gave.

    registry: its address, whose zone is used for link-local addresses: a server's own zone means
    nothing here. Raises ConfigError if the server is not reached by this side's HCA, else as
    control.connect_tcp.
    """
    parts = urllib.parse.urlsplit(address)
    if parts.scheme not in SCHEMES:
        if hca.network:
            raise ConfigError(
                'the server serves clients of its own host only: start it with '
                f'--hca {hca.scheme}, or use hca="soft" on that host'
            )
        return connect_unix(address, token, timeout, stopped)
    if parts.scheme != hca.scheme:
        name = "ucx" if parts.scheme == "ucx" else "mlx5:<device>"
        through = "UCX" if parts.scheme == "ucx" else "an mlx5 adapter"
        raise ConfigError(f'the server is reached through {through}: use hca="{name}" '
                          f"(--hca {name})")
    place = with_zone(parts.netloc, registry)
    return connect_tcp(place, token, timeout, stopped, server=True)


def with_zone(address: str, registry: str) -> str:
    """A link-local address with the zone through which this side reaches the registry."""
    host, port = parse_address(address)
    if not (registry and is_address(host) and ipaddress.ip_address(host).is_link_local):
        return address
    bare, _, zone = host.partition("%")
    ours = parse_address(registry)[0].partition("%")[2]
    zone = ours or zone
    return format_address(f"{bare}%{zone}" if zone else bare, port)
