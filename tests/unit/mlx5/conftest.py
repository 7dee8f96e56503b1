"""Fake adapters on one fabric, all given back at the end with nothing left open on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from tests.mlx5_fake import Fabric, FakeDevice, FakePort

from expertwire.hca.mlx5 import Mlx5Hca


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
