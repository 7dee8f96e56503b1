"""Two users of one host: neither gets a byte from the other, and no name of theirs can clash."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from expertwire.control.frames import connect_unix, listen_unix
from expertwire.errors import AuthError

TOKEN = b"two-users-token-0123456789"
NOBODY = 65534

as_another = pytest.mark.skipif(os.getuid() != 0, reason="only root can become a second user")


class AnotherUser:
    """Runs a function in a forked process of another user; `words` are what it returned."""

    def __init__(self, work: Callable[[], bytes]):
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                os.write(write, b"returned " + repr(work()).encode())
            finally:
                os._exit(0)
        os.close(write)
        self._read = read

    def words(self) -> str:
        with os.fdopen(self._read, "rb") as file:
            words = file.read().decode()
        os.waitpid(self.pid, 0)
        return words


@as_another
def test_another_users_connection_gets_no_byte():
    listener = listen_unix(TOKEN)

    def connect() -> bytes:  # it would have the right token: it does not come to that
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(5)
            sock.connect("\0" + listener.address)
            return sock.recv(100)

    try:
        assert AnotherUser(connect).words() == "returned b''"
        connect_unix(listener.address, TOKEN).close()  # we still can
    finally:
        listener.close()


@as_another
def test_a_server_of_another_user_is_not_talked_to():
    address = f"expertwire-{secrets.token_hex(16)}"

    def listen() -> bytes:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(5)
            sock.bind("\0" + address)
            sock.listen()
            connection, _ = sock.accept()
            with connection:
                connection.settimeout(5)
                return connection.recv(100)

    other = AnotherUser(listen)
    deadline = time.monotonic() + 5
    while f"@{address}" not in Path("/proc/net/unix").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(AuthError, match=f"belongs to user {NOBODY}"):
        connect_unix(address, TOKEN)
    assert other.words() == "returned b''", "nothing was said to it"


def test_addresses_are_fresh_and_leave_no_file():
    """No fixed path that another process, user or run could have taken, and none left when a
    process is killed: abstract addresses go with their socket."""
    listeners = [listen_unix(TOKEN) for _ in range(8)]
    addresses = {listener.address for listener in listeners}
    assert len(addresses) == 8
    assert not any(Path(place, address).exists()
                   for address in addresses for place in ("/tmp", os.getcwd(), "/run"))
    for listener in listeners:
        listener.close()
    for address in addresses:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind("\0" + address)  # it is free again
