"""Fake adapters on one fabric, all given back at the end with nothing left open on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from expertwire.hca.mlx5 import Mlx5Hca
from tests.unit.mlx5.fake_verbs import Fabric, FakeDevice, FakePort


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PORT", "GID_INDEX", "PKEY", "MTU", "SL", "TRAFFIC_CLASS", "ORDERED_PATH"):
        monkeypatch.delenv(f"EXPERTWIRE_MLX5_{name}", raising=False)


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    fabric = Fabric()
    yield fabric
    for device in fabric.devices:
        device.close()


Opener = Callable[..., tuple[FakeDevice, Mlx5Hca]]


@pytest.fixture
def opened(fabric: Fabric) -> Iterator[Opener]:
    """opened(*ports, **options): a fake adapter with these ports, and the HCA made of it."""
    with contextlib.ExitStack() as stack:

        def open_one(*ports: FakePort, caps=None, **options):
            device = FakeDevice(fabric, f"mlx5_{len(fabric.devices)}", *ports, caps=caps)
            hca = stack.enter_context(Mlx5Hca(device.name, verbs=device.verbs, **options))
            return device, hca

        yield open_one


def connected(here: Mlx5Hca, there: Mlx5Hca, depth: int = 64):
    """A queue pair of each, connected with the other. Returns both."""
    windows = here.create_window(), there.create_window()
    ends = here.create_qp(depth), there.create_qp(depth)
    for hca, own, qp, window, remote in (
        (here, windows[0], ends[0], windows[1], ends[1]),
        (there, windows[1], ends[1], windows[0], ends[0]),
    ):
        qp.connect(hca.connect_peer(own, window.address), remote.info.qpn)
    return ends
