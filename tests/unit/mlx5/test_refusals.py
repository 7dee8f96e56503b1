"""What is missing on a machine: one named error each, which says what to do, and nothing left."""

from __future__ import annotations

import errno
import importlib

import pytest
from tests.mlx5_fake import FakeCaps, FakeDevice, FakePort

from expertwire.control.memory import ACCESS_LOCAL_WRITE
from expertwire.errors import ConfigError, ExpertwireError, HcaError
from expertwire.hca import open_hca
from expertwire.hca.mlx5 import Mlx5Hca
from expertwire.hca.mlx5 import errors as named
from expertwire.hca.mlx5.verbs import load


@pytest.mark.parametrize("name", ["mlx5", "mlx5:", "mlx5:mlx5_0:", "mlx5:mlx5_0:x", "mlx5::1"])
def test_names_that_are_none(name):
    with pytest.raises(ConfigError, match="mlx5:<device>"):
        open_hca(name)


def test_without_pyverbs(monkeypatch):
    real = importlib.import_module

    def no_pyverbs(name, package=None):
        if name.startswith("pyverbs"):
            raise ModuleNotFoundError("No module named 'pyverbs'")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", no_pyverbs)
    with pytest.raises(named.VerbsMissing, match=r"No module named 'pyverbs'.*python3-pyverbs"):
        open_hca("mlx5:mlx5_0")


def test_pyverbs_that_is_too_old(monkeypatch):
    monkeypatch.setattr(importlib, "import_module", lambda name: object())
    with pytest.raises(named.VerbsMissing, match="get_device_list"):
        load()


def test_port_in_the_name(fabric):
    device = FakeDevice(fabric, "mlx5_0", FakePort(), FakePort(lid=5))
    with open_hca("mlx5:mlx5_0:2", verbs=device.verbs) as hca:
        assert hca.device.port.lid == 5
    with pytest.raises(ConfigError, match="has 2 ports"):
        open_hca("mlx5:mlx5_0:3", verbs=device.verbs)


def test_no_such_device(fabric):
    device = FakeDevice(fabric, "mlx5_0")
    with pytest.raises(named.DeviceNotFound, match="no RDMA device 'mlx5_7': there are mlx5_0"):
        Mlx5Hca("mlx5_7", verbs=device.verbs)
    device.fail["get_device_list"] = 0
    with pytest.raises(named.DeviceNotFound, match="modprobe mlx5_ib"):
        Mlx5Hca("mlx5_0", verbs=device.verbs)


@pytest.mark.parametrize("call, code, kind, words", [
    ("open", errno.EACCES, named.DeviceRefused, "opening mlx5_0.*usermod -aG rdma"),
    ("open", errno.EOPNOTSUPP, named.DeviceRefused, "DevX.*UCTX_EN=1"),
    ("query_port", errno.EIO, named.CommandRefused, "port 1.*EIO.*dmesg"),
    ("devx", errno.EREMOTEIO, named.CommandRefused, "QUERY_HCA_CAP.*EREMOTEIO"),
    ("PD", errno.ENOMEM, named.DeviceRefused, "protection domain.*ulimit -l"),
])
def test_opening_fails_with_a_name_and_leaves_nothing(fabric, call, code, kind, words):
    device = FakeDevice(fabric, "mlx5_0")
    device.fail[call] = code
    with pytest.raises(kind, match=words) as caught:
        Mlx5Hca("mlx5_0", verbs=device.verbs)
    assert isinstance(caught.value, HcaError) and isinstance(caught.value, ExpertwireError)
    assert not device.open


@pytest.mark.parametrize("port, words", [
    (FakePort(state=1), "is DOWN.*cable"), (FakePort(state=2), "is INIT.*subnet manager"),
    (FakePort(state=3), "is ARMED.*subnet manager"), (FakePort(lid=0), "no LID")])
def test_port_that_is_not_up(fabric, port, words):
    device = FakeDevice(fabric, "mlx5_0", port)
    with pytest.raises(named.PortDown, match=words):
        Mlx5Hca("mlx5_0", verbs=device.verbs)
    assert not device.open


@pytest.mark.parametrize("general, words", [
    (dict(cqe_version=0), "CQE version 0"), (dict(rc=0), "reliable connections 0")])
def test_adapter_that_is_too_old(fabric, general, words):
    caps = FakeCaps()
    caps.general |= general
    device = FakeDevice(fabric, "mlx5_0", caps=caps)
    with pytest.raises(named.DeviceRefused, match=words):
        Mlx5Hca("mlx5_0", verbs=device.verbs)
    assert not device.open


@pytest.mark.parametrize("general, atomic", [
    (dict(atomic=0), {}), ({}, dict(atomic_operations=7)), ({}, dict(atomic_size_qp=4))])
def test_without_masked_atomics_only_an_ordered_path_will_do(fabric, general, atomic):
    caps = FakeCaps()
    caps.general |= general
    caps.atomic |= atomic
    device = FakeDevice(fabric, "mlx5_0", caps=caps)
    with pytest.raises(HcaError, match="EXPERTWIRE_MLX5_ORDERED_PATH=1"):
        Mlx5Hca("mlx5_0", verbs=device.verbs)
    assert not device.open
    with Mlx5Hca("mlx5_0", verbs=device.verbs, ordered_path=True) as hca:
        assert not hca.relaxed_ordering


def test_a_path_is_not_ordered_unless_somebody_says_so(opened):
    assert opened()[1].relaxed_ordering


def test_memory_that_may_not_be_locked(opened):
    device, hca = opened()
    with pytest.raises(named.GpuMemoryRefused, match="nvidia-peermem"):
        device.fail["MR"] = errno.EFAULT
        hca.register(0x7F0000000000, 4096, ACCESS_LOCAL_WRITE)
    device.fail["MR"] = errno.ENOMEM
    with pytest.raises(named.DeviceRefused, match=r"4096 bytes.*--ulimit memlock=-1"):
        hca.register(0x7F0000000000, 4096, ACCESS_LOCAL_WRITE)


@pytest.mark.parametrize("call, code", [
    ("UMEM", errno.ENOMEM), ("query_eqn", errno.EOPNOTSUPP), ("devx", errno.EREMOTEIO)])
def test_queue_pair_that_cannot_be_made_leaves_nothing(opened, call, code):
    device, hca = opened()
    before = list(device.open)
    device.fail[call] = code
    with pytest.raises(HcaError):
        hca.create_qp(64)
    assert device.open == before
    device.fail.clear()
    hca.create_qp(64)


def test_register_page_falls_back_once_and_then_says_what_is_missing(opened):
    device, hca = opened()
    device.fail["UAR 0x80000000"] = errno.EINVAL
    hca.create_qp(64)
    assert device.asked("UAR 0x1") and not device.asked("UAR 0x0")  # never a combining one
    device.fail["UAR 0x1"] = errno.EINVAL
    with pytest.raises(HcaError, match=r"uncached register page.*Linux 5\.8"):
        hca.create_qp(64)


def test_what_an_adapter_has_not(opened):
    _, hca = opened()
    window = hca.create_window()
    with pytest.raises(HcaError, match='signal_mode="add"'):
        window.watch(0, 4096, 2)
    with pytest.raises(HcaError, match="connect_peer"):
        hca.import_peer(0, 0, [])
    peer = hca.connect_peer(window, window.wire)
    with pytest.raises(HcaError, match="do_ibgda"):
        peer.map(1, 2, 3)
    with pytest.raises(HcaError, match="0x99 is not registered"):
        window.revoke(0x99)
    with pytest.raises(ConfigError, match="register or proxy"):
        Mlx5Hca("mlx5_0", doorbell="bell")
