"""`expertwire doctor` about UCX and mlx5 adapters: machines described by folders like /sys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from expertwire.doctor import fabric
from expertwire.doctor.fabric import mlx5_findings, ucx_findings
from expertwire.doctor.findings import Probe, Roots

OPENED = {"opened": "mlx5_0", "open_hca": "not part of this release"}


@pytest.fixture
def roots(tmp_path):
    for name in ("sys", "proc", "dev"):
        (tmp_path / name).mkdir()
    return Roots(tmp_path / "sys", tmp_path / "proc", tmp_path / "dev")


def add_device(roots, name="mlx5_0", driver="mlx5_core", state="4: ACTIVE", uverbs=True):
    device = roots.sys / "class/infiniband" / name
    port = device / "ports/1"
    port.mkdir(parents=True)
    (device / "fw_ver").write_text("28.42.1000\n")
    for file, text in (("state", state), ("link_layer", "InfiniBand"), ("rate", "400 Gb/sec")):
        (port / file).write_text(text + "\n")
    (device / "device/infiniband_verbs/uverbs3").mkdir(parents=True)
    (device / "device/driver").symlink_to(f"/sys/bus/pci/drivers/{driver}")
    if uverbs:
        (roots.dev / "infiniband").mkdir(exist_ok=True)
        (roots.dev / "infiniband/uverbs3").write_text("")
    return device


def names(found):
    return {finding.name: finding for finding in found}


def check(roots, verbs=OPENED):
    return names(mlx5_findings(roots, lambda device: verbs))


def test_an_adapter_that_works_is_opened(roots):
    add_device(roots)
    asked = []
    found = names(mlx5_findings(roots, lambda device: asked.append(device) or OPENED))
    assert asked == ["mlx5_0"]
    assert found["mlx5_0 verbs"].state == "ok"
    port = found["mlx5_0 port 1"]
    assert port.state == "ok" and "400 Gb/sec" in port.text and "28.42.1000" in port.text
    # What this release cannot do yet is said, whatever the machine can.
    assert found["open_hca('mlx5:mlx5_0')"].state == "fail"
    assert check(roots, {**OPENED, "open_hca": ""})["open_hca('mlx5:mlx5_0')"].state == "ok"


def test_no_adapter(roots):
    assert check(roots)["adapter"].state == "absent"
    add_device(roots, "rxe0", driver="rdma_rxe")
    assert "rxe0" in check(roots)["adapter"].text


def test_a_connectx_without_its_driver(roots):
    card = roots.sys / "bus/pci/devices/0000:41:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x15b3\n")
    assert check(roots)["adapter"].fix == "modprobe mlx5_ib"
    (roots.proc.parent / ".dockerenv").write_text("")
    assert "--device=/dev/infiniband" in check(roots)["adapter"].fix


@pytest.mark.parametrize(("state", "words"), [
    ("2: INIT", "subnet manager"), ("1: DOWN", "cable"),
])
def test_a_port_that_is_not_up(roots, state, words):
    add_device(roots, state=state)
    found = check(roots)
    assert words in found["mlx5_0 port 1"].fix and found["mlx5_0 link"].state == "fail"


def test_the_device_file(roots):
    add_device(roots, uverbs=False)
    assert check(roots)["mlx5_0 verbs"].fix == "modprobe ib_uverbs"
    (roots.proc / "1").mkdir()
    (roots.proc / "1/cgroup").write_text("0::/kubepods/burstable/pod\n")
    assert "--cap-add=IPC_LOCK" in check(roots)["mlx5_0 verbs"].fix


def test_a_device_file_of_others(roots, monkeypatch):
    add_device(roots)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests may run as root
    found = check(roots)["mlx5_0 verbs"]
    assert found.state == "fail" and "usermod -aG rdma" in found.fix


@pytest.mark.parametrize(("facts", "state", "words"), [
    ({"error": "ModuleNotFoundError: No module named 'pyverbs'"}, "fail", "python3-pyverbs"),
    ({"error": "PyverbsRDMAError: Cannot allocate memory"}, "fail", "ulimit -l"),
    ({"late": True}, "unknown", "ibv_devinfo"),
])
def test_verbs_that_do_not_open(roots, facts, state, words):
    add_device(roots)
    found = check(roots, facts)["mlx5_0 verbs"]
    assert found.state == state and words in found.fix


def nvidia(roots, version="NVIDIA UNIX x86_64 Kernel Module  550", modules="", params=""):
    folder = roots.proc / "driver/nvidia"
    folder.mkdir(parents=True)
    (folder / "version").write_text(version)
    (folder / "params").write_text(params)
    (roots.proc / "modules").write_text(modules)


def test_memory_of_gpus(roots):
    add_device(roots)
    assert "GPU memory" not in check(roots), "there is no GPU"
    nvidia(roots)
    found = check(roots)
    assert found["GPU memory"].fix == "sudo modprobe nvidia-peermem"
    assert found["doorbell from the GPU"].state == "warn"
    assert "PeerMappingOverride=1" in found["doorbell from the GPU"].fix


@pytest.mark.parametrize("options", [
    {"modules": "ib_core 1 0 - Live\nnvidia_peermem 16384 0 - Live 0x0\n"},
    {"version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.1"},
])
def test_two_ways_to_reach_memory_of_gpus(roots, options):
    add_device(roots)
    nvidia(roots, **options, params='EnableStreamMemOPs: 1\n'
                                    'RegistryDwords: "PeerMappingOverride=1;Other=2"\n')
    found = check(roots)
    assert found["GPU memory"].state == "ok" and found["doorbell from the GPU"].state == "ok"


def test_locked_memory(monkeypatch):
    monkeypatch.setattr(fabric.resource, "getrlimit", lambda what: (8 << 20, 8 << 20))
    assert "limits.d" in fabric._memlock().fix
    monkeypatch.setattr(fabric.resource, "getrlimit", lambda what: (8 << 20, -1))
    assert fabric._memlock().fix == "ulimit -l unlimited"
    monkeypatch.setattr(fabric.resource, "getrlimit", lambda what: (-1, -1))
    assert fabric._memlock().state == "ok"


def ucx(*transports):
    return names(ucx_findings({"version": "1.22.0", "library": "x", "transports": transports,
                               "open_hca": ""}))


def test_ucx():
    assert ucx("self", "tcp", "posix", "ib")["transports"].state == "ok"
    assert ucx("self", "tcp")["transports"].state == "warn"
    assert ucx("self", "posix", "cuda_cpy")["transports"].state == "fail"
    (missing,) = ucx_findings({"missing": "libucp.so.0: cannot open"})
    assert missing.state == "fail" and "expertwire[ucx]" in missing.fix
    (crashed,) = ucx_findings({"error": "the check crashed (SIGSEGV)"})
    assert crashed.state == "fail" and "UCX_TLS" in crashed.fix and "pip" not in crashed.fix
    (late,) = ucx_findings({"late": True})
    assert late.state == "unknown" and late.fix


def test_the_ucx_probe_says_what_is_here():
    """Either no UCX at all, or its transports: those in one process are always among them."""
    facts = Probe("ucx").result(time.monotonic() + 90)
    assert "missing" in facts or {"self", "tcp"} <= set(facts.get("transports", ())), facts
    for finding in ucx_findings(facts):
        assert finding.state == "ok" or finding.fix, finding


def test_the_ucx_probe_prints_its_object_alone():
    run = subprocess.run([sys.executable, "-P", "-m", "expertwire.doctor.probe", "ucx"],
                         capture_output=True, text=True, timeout=90)
    assert run.returncode == 0 and run.stderr == "", run
    assert json.loads(run.stdout).keys() & {"missing", "transports"}


def test_the_ucx_probe_looks_at_the_library_of_the_hca():
    facts = Probe("ucx", env={"EXPERTWIRE_UCX_LIBRARY": "/no/libucp.so.0"}).result(
        time.monotonic() + 90)
    assert "/no/libucp.so.0" in facts["missing"]
