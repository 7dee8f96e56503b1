"""Members that cannot be connected to: named within the deadline, and nobody waits for them."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from tests.system.cluster import TOKEN, batch, cluster, expected, model_facts

from expertwire import Client
from expertwire.errors import NoServerError
from expertwire.registry.membership import Lease

MODEL = model_facts(num_experts=6, hidden_size=16, top_k=2)


@contextlib.contextmanager
def endpoint(kind: str) -> Iterator[str]:
    """The abstract address of something that is no server."""
    address = f"expertwire-test-{secrets.token_hex(8)}"
    if kind == "dead":
        yield address
        return
    stop = threading.Event()
    kept: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + address)
        listener.listen(8)
        listener.settimeout(0.05)

        def accept() -> None:
            while not stop.is_set():
                try:
                    peer, _ = listener.accept()
                except TimeoutError:
                    continue
                if kind == "hangs up":
                    peer.close()
                    continue
                if kind == "babbles":
                    peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                kept.append(peer)

        thread = threading.Thread(target=accept)
        if kind != "full":  # nobody ever accepts
            thread.start()
        try:
            yield address
        finally:
            stop.set()
            if thread.ident:
                thread.join()
            for peer in kept:
                peer.close()


@pytest.mark.parametrize("kind", ["dead", "half-open", "hangs up", "babbles", "full"])
def test_bad_endpoints_are_named_and_hold_up_nobody(kind):
    with cluster([[0, 1, 2, 3]], MODEL) as (_, _, registry), endpoint(kind) as address:
        facts = {"name": "bad", "address": address, "pid": 1, "model": MODEL,
                 "experts": [3, 4, 5]}
        lease = Lease(registry.address, TOKEN, facts)
        lease.wait_registered(5)
        start = time.monotonic()
        with Client(registry, token=TOKEN, missing_timeout=0.4) as client:
            client.links.wait(lambda t: len(t.links) == 1, 5)
            assert time.monotonic() - start < 1.8, "the good one does not wait for the bad one"
            hidden, ids, weights = batch(9, MODEL)
            good = ids % 4
            torch.testing.assert_close(
                client.moe(0, hidden, good, weights), expected(hidden, good, weights, MODEL)
            )
            deadline = time.monotonic() + 4
            while "bad" not in client.links.refusals:
                assert time.monotonic() < deadline, "no reason within the deadline"
                time.sleep(0.01)
            start = time.monotonic()
            with pytest.raises(NoServerError, match=f"bad: .*{address}|bad: .*peer"):
                client.moe(0, hidden, torch.full_like(ids, 5), weights)
            assert time.monotonic() - start < 1.8
            start = time.monotonic()
        assert time.monotonic() - start < 1.8, "closing does not wait for it either"
        lease.close()


def test_a_policy_of_raise_does_not_wait_for_an_endpoint_that_failed():
    with cluster([[0, 1, 2, 3]], MODEL) as (_, _, registry), endpoint("dead") as address:
        facts = {"name": "bad", "address": address, "pid": 1, "model": MODEL, "experts": [4, 5]}
        lease = Lease(registry.address, TOKEN, facts)
        lease.wait_registered(5)
        with Client(registry, token=TOKEN, on_missing="raise", connect_timeout=30) as client:
            client.links.wait(lambda t: len(t.links) == 1, 5)
            hidden, ids, weights = batch(9, MODEL)
            start = time.monotonic()
            with pytest.raises(NoServerError) as caught:
                client.moe(1, hidden, torch.full_like(ids, 4), weights)
            assert time.monotonic() - start < 3
            assert caught.value.experts == (4,) and caught.value.layer == 1
        lease.close()
