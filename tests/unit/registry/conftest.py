"""A registry of its own for every test of this folder, and peers that say what the test wants."""

from __future__ import annotations

import pytest
from tests.leftovers import nothing_left_behind
from tests.registry_peers import TOKEN, peers

from expertwire.registry.registry import Registry


@pytest.fixture(autouse=True)
def _clean():
    with nothing_left_behind():
        yield


@pytest.fixture
def reg():
    with Registry(token=TOKEN, lease_seconds=5.0, handshake_seconds=0.5) as running:
        yield running


@pytest.fixture
def peer(reg):
    with peers(reg.address) as make:
        yield make
