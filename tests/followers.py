"""What watches a registry from the outside, and notes what it saw."""

from __future__ import annotations

import socket

from expertwire.registry.membership import Members, Membership
from tests.registry_peers import TOKEN


def ids(members: Members) -> set[str]:
    return {s.server_id for s in members.servers}


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


class Follower:
    """A Membership that keeps every snapshot."""

    def __init__(self, address: str):
        self.snapshots: list[Members] = []
        self.membership = Membership(address, TOKEN, client_name="follower")
        self.membership.on_change = self._keep

    def _keep(self) -> None:
        self.snapshots.append(self.membership.snapshot())

    def wait(self, expected: set[str], timeout: float = 3.0) -> Members:
        return self.membership.wait(lambda m: ids(m) == expected, timeout)

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.membership.close()


class closing(list):
    """Closes what was put in, newest first."""

    def __enter__(self) -> closing:
        return self

    def __exit__(self, *_: object) -> None:
        for thing in reversed(self):
            thing.close()
