"""`python -m expertwire.hca.mlx5`: what it prints, and what it says when something is wrong."""

from __future__ import annotations

import pytest
from tests.mlx5_fake import Fabric, FakeCaps, FakeDevice, FakePort

import expertwire.hca.mlx5.hca as mlx5_hca
from expertwire.hca.mlx5.__main__ import main
from expertwire.hca.mlx5.device import Device
from expertwire.hca.soft import SoftHca


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch):
    """adapter(port, caps=None): the one adapter that pyverbs seems to find."""
    softs, devices = [], []

    def make(port: FakePort, caps: FakeCaps | None = None) -> FakeDevice:
        softs.append(SoftHca(spin=True))
        devices.append(FakeDevice(Fabric(), "mlx5_0", port, caps=caps, soft=softs[-1]))
        monkeypatch.setattr(mlx5_hca, "Device",
                            lambda name, config, verbs: Device(name, config, devices[-1].verbs))
        return devices[-1]

    yield make
    for device in devices:
        device.close()
    for soft in softs:
        soft.close()


def test_everything_arrives(adapter, capsys):
    device = adapter(FakePort(link_layer=2, lid=0, active_mtu=3,
                              gids=((3, 2, "::ffff:10.0.0.1"),)))
    assert main("mlx5_0:1") == 0
    out = capsys.readouterr().out
    assert "port 1: Ethernet, MTU 1024" in out and "GID 3: RoCE v2 10.0.0.1" in out
    assert "1048576 bytes there and back" in out and out.endswith("all of it arrived\n")
    assert device.soft.stats()["wqes"] == {"RDMA_WRITE": 10, "MASKED_FA": 10}
    assert not device.open


def test_infiniband_too(adapter, capsys):
    adapter(FakePort(lid=0x2B, active_mtu=5))
    assert main("mlx5_0") == 0
    assert "InfiniBand, LID 0x2b, MTU 4096" in capsys.readouterr().out


def test_failure_says_how_far_it_came(adapter, capsys):
    device = adapter(FakePort())

    def wrong_key(addr, num_bytes, access):
        lkey, rkey = FakeDevice.register(device, addr, num_bytes, access)
        return lkey, rkey ^ 0x100

    device.register = wrong_key  # as if the peer's key were not the one that it told
    assert main("mlx5_0") == 1
    err = capsys.readouterr().err
    assert "connected: RTS: device code ended with" in err and "syndrome 0x13 at entry 0" in err
    assert not device.open


def test_no_adapter(adapter, capsys):
    device = adapter(FakePort(state=1))
    assert main("mlx5_0") == 1
    assert "PortDown: port 1 of mlx5_0 is DOWN" in capsys.readouterr().err
    assert not device.open
