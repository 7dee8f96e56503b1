"""The network of a chaos plan: what everybody's queues and the ways to the registry meet.

Faults of the data path are those of hca/fault.py, where a client's or a server's queues begin. The
transport is reliable, as on an adapter: a lost packet is one that comes late, and what is lost for
good is a work-queue entry that completes with an error. All processes reach the registry through a
relay of this process, which can hold what it is given, in one direction or in both, or hang up.
"""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..control.channel import format_address, parse_address
from ..errors import ConfigError
from ..hca.fault import Faults, FaultyHca
from ..hca.soft import HOOK_STALL
from ..hca.wrap import Hook

if TYPE_CHECKING:
    from .load import LoadThread

RETRY_EXCEEDED = 0x15  # what an adapter reports when the peer does not answer
WAYS = ("requests", "replies", "both")
CONTROL = ("partition", "half-open", "hang-up")
LOOK_SECONDS = 0.05
PIECE_BYTES = 1 << 16


@dataclass(frozen=True)
class Network:
    """What a phase does to the network until it ends.

    way: what it happens to: "requests" (what clients send), "replies" (what servers send), "both".
    mtu, delay, reorder, duplicate: as mtu, max_delay, reorder, duplicate_one_in of Faults.
    loss: every so-manieth work-queue entry completes with an error (retries exceeded).
    cut: every entry to these servers, or from them, does. hang: such entries wait, and nobody is
        told.
    control: the connections to the registry: "partition" holds everything, also new connections;
        "half-open" holds what the registry says; "hang-up" closes them once.
    """

    way: str = "requests"
    mtu: int = 0
    delay: int = 0
    reorder: bool = False
    duplicate: int = 0
    loss: int = 0
    cut: tuple[str, ...] = ()
    hang: tuple[str, ...] = ()
    control: str = ""

    @property
    def loses_servers(self) -> bool:
        """Whether clients give servers up that are there."""
        return bool(self.loss or self.cut or self.hang)

    @property
    def words(self) -> str:
        """What is broken, in short."""
        said = []
        path = [name for name in ("mtu", "delay", "reorder", "duplicate", "loss")
                if getattr(self, name)]
        path += [" ".join([name, *getattr(self, name)]) for name in ("cut", "hang")
                 if getattr(self, name)]
        if path:
            said.append(f"{'both ways' if self.way == 'both' else self.way}: {' '.join(path)}")
        if self.control:
            said.append(f"registry: {self.control}")
        return ", ".join(said)


def parse_network(content: object, where: str) -> Network:
    """Raises ConfigError that says what does not fit."""
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"{where}: network takes an object with what goes wrong")
    known = Network.__dataclass_fields__
    if unknown := set(content) - set(known):
        raise ConfigError(f"{where}: network has no {', '.join(sorted(unknown))}; "
                          f"known are {', '.join(known)}")
    given: dict[str, Any] = dict(content)
    for name in ("mtu", "delay", "duplicate", "loss"):
        value = given.get(name, 0)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 20:
            raise ConfigError(f"{where}: {name} must be a whole number from 0 on, not {value!r}")
    if not isinstance(given.get("reorder", False), bool):
        raise ConfigError(f"{where}: reorder is true or false")
    for name in ("cut", "hang"):
        value = given.get(name, [])
        names = value if isinstance(value, list) else [value]
        if not all(isinstance(n, str) for n in names):
            raise ConfigError(f"{where}: {name} takes names of servers")
        given[name] = tuple(names)
    if given.get("way", "requests") not in WAYS:
        raise ConfigError(f"{where}: way is one of {', '.join(WAYS)}")
    if given.get("control", "") not in ("", *CONTROL):
        raise ConfigError(f"{where}: control is one of {', '.join(CONTROL)}")
    return Network(**given)


def set_data_faults(load: LoadThread, network: Network, seed: int) -> None:
    """From now on the client's queues meet these faults."""
    queues = {state.qpn: link.server_id for link in load.client.links.table.links
              for state in link.endpoint.qp_states}
    break_path(load.client.hca, network, seed, lambda qpn: queues.get(qpn, ""))


def clear_data_faults(load: LoadThread) -> None:
    """What is under way lands; from now on everything does at once."""
    mend_path(load.client.hca)


def break_path(hca: Any, network: Network, seed: int, server_of: Callable[[int], str]) -> None:
    """From now on what this HCA sends meets the faults. server_of: queue number -> which server is
    at one of the queue's ends."""
    faulty = FaultyHca(hca, Faults(
        seed=seed, mtu=network.mtu, reorder=network.reorder, max_delay=network.delay,
        duplicate_one_in=network.duplicate,
    ))
    faulty.set_hook(_entry_hook(network, server_of, random.Random(seed)))


def _entry_hook(network: Network, server_of: Callable[[int], str], chance: random.Random) -> Hook:
    def hook(_context: Any, qpn: int, _idx: int, _wqe: int, _bytes: int) -> int:
        server = server_of(qpn)
        if server in network.cut or (network.loss and chance.randrange(network.loss) == 0):
            return RETRY_EXCEEDED
        return HOOK_STALL if server in network.hang else 0

    return hook


def mend_path(hca: Any) -> None:
    """What is under way lands; from now on everything does at once."""
    hca.set_hook(None)
    hca.set_faults(None)


class Relay:
    """A TCP port that leads to another one, through a path that can be broken.

        relay = Relay("127.0.0.1:7700"); relay.address; relay.control = "partition"; relay.close()

    Bytes that are held are not lost: they come when the path is whole again, as with TCP.
    """

    def __init__(self, target: str):
        self._target = parse_address(target)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._listener.setblocking(False)
        host, port = self._listener.getsockname()
        self.address = format_address(host, port)
        self.control = ""
        self._others: dict[socket.socket, socket.socket] = {}
        self._near: set[socket.socket] = set()  # ends of those who connected
        self._stop = threading.Event()
        self._hang_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-relay", daemon=True)
        self._thread.start()

    def hang_up(self) -> None:
        """Closes every connection, soon."""
        self._hang_up.set()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)
        self._drop(list(self._others))
        self._listener.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._hang_up.is_set():
                self._hang_up.clear()
                self._drop(list(self._others))
            with selectors.DefaultSelector() as selector:
                for sock in self._listened_to():
                    selector.register(sock, selectors.EVENT_READ)
                for key, _ in selector.select(LOOK_SECONDS):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket):
                        self._forward(key.fileobj)

    def _listened_to(self) -> Iterable[socket.socket]:
        if self.control == "partition":
            return []
        if self.control == "half-open":
            return [self._listener, *self._near]
        return [self._listener, *self._others]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            near, _ = self._listener.accept()
            try:
                far = socket.create_connection(self._target, timeout=1)
            except OSError:  # the registry is away: so are we
                near.close()
                return
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.settimeout(1.0)
            self._others |= {near: far, far: near}
            self._near.add(near)

    def _forward(self, sock: socket.socket) -> None:
        other = self._others.get(sock)
        if other is None:  # dropped in this round
            return
        try:
            data = sock.recv(PIECE_BYTES)
            if data:
                other.sendall(data)
                return
        except OSError:
            pass
        self._drop([sock])

    def _drop(self, socks: list[socket.socket]) -> None:
        for sock in socks:
            other = self._others.pop(sock, None)
            for end in (sock, other):
                if end is not None:
                    self._others.pop(end, None)
                    self._near.discard(end)
                    end.close()
