"""Paths between hosts: UCX, and mlx5 adapters with what GPU-initiated RDMA needs around them."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .findings import MORE_TIME, Finding, Roots

SHARED = {"self", "sysv", "posix", "cma", "xpmem", "knem"}
LOCKED_BYTES = 64 << 20
CONTAINER_FLAGS = ("docker run --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1 "
                   "--network=host ...")


def ucx_findings(facts: dict[str, Any]) -> list[Finding]:
    """facts: of probe.ucx."""
    if facts.get("late"):
        return [Finding("ucx", "library", "unknown", "UCX did not answer in time", MORE_TIME)]
    if "missing" in facts:
        return [Finding("ucx", "library", "fail", facts["missing"],
                        "pip install 'expertwire[ucx]', or: apt-get install libucx0")]
    if "error" in facts:  # it is there, and ends its process
        return [Finding("ucx", "library", "fail", facts["error"],
                        "UCX_TLS=tcp,self expertwire doctor; if that helps, keep UCX_TLS, else "
                        "another UCX: EXPERTWIRE_UCX_LIBRARY=/path/to/libucp.so.0")]
    names = facts["transports"]
    wires = [name for name in names if name not in SHARED and not name.startswith("cuda")]
    found = [Finding("ucx", "library", "ok", f"UCX {facts['version']} ({facts['library']})")]
    if wires:
        text = f"{', '.join(wires)} between hosts; {', '.join(sorted(set(names) - set(wires)))}"
        state = "ok" if "ib" in wires else "warn"
        fix = "" if "ib" in wires else "no RDMA: TCP only, see the mlx5 lines"
        found.append(Finding("ucx", "transports", state, text, fix))
    else:
        found.append(Finding("ucx", "transports", "fail", f"none between hosts: {names}",
                             "ucx_info -d"))
    return [*found, _opens("ucx", facts["open_hca"])]


def _opens(name: str, why_not: str) -> Finding:
    """Whether this release could open the HCA here."""
    kind, called = name.split(":")[0], f"open_hca({name!r})"
    if why_not:
        fix = ("docs/mlx5.md, \"When something is missing\"; until then soft on one host, or ucx"
               if kind == "mlx5" else "use the soft HCA, on one host")
        return Finding(kind, called, "fail", why_not, fix)
    return Finding(kind, called, "ok", "opened and closed")


# -------------------------------------------------------------------- mlx5


def mlx5_findings(roots: Roots, try_verbs: Callable[[str], dict[str, Any]]) -> list[Finding]:
    """try_verbs(device): what probe.verbs says of it."""
    folder = roots.sys / "class/infiniband"
    devices = sorted(folder.iterdir()) if folder.is_dir() else []
    mine = [device for device in devices if _driver(device) == "mlx5_core"]
    if not mine:
        return [_no_device(roots, [device.name for device in devices])]
    found: list[Finding] = []
    for device in mine:
        found += [*_ports(roots, device), *_verbs(roots, device, try_verbs)]
    return [*found, _memlock(), *_gpu_memory(roots)]


def _driver(device: Path) -> str:
    link = device / "device/driver"
    return os.path.basename(os.readlink(link)) if link.is_symlink() else ""


def _no_device(roots: Roots, others: list[str]) -> Finding:
    if others:
        return Finding("mlx5", "adapter", "absent",
                       f"RDMA devices of other drivers only: {', '.join(others)}")
    pci = roots.sys / "bus/pci/devices"
    cards = [p.name for p in pci.glob("*") if roots.read(p / "vendor") == "0x15b3"]
    if not cards:
        return Finding("mlx5", "adapter", "absent", "no RDMA device, and no ConnectX on the bus",
                       "needs a ConnectX-5 or newer in this machine; ucx works over any network")
    if roots.in_container:
        return Finding("mlx5", "adapter", "fail", f"a ConnectX ({cards[0]}) without an RDMA device "
                       "in this container", CONTAINER_FLAGS)
    return Finding("mlx5", "adapter", "fail", f"a ConnectX ({cards[0]}) without its RDMA driver",
                   "modprobe mlx5_ib")


def _ports(roots: Roots, device: Path) -> list[Finding]:
    firmware = roots.read(device / "fw_ver") or "unknown"
    found = []
    for port in sorted((device / "ports").glob("*")):
        state = roots.read(port / "state")  # as "4: ACTIVE"
        link, rate = roots.read(port / "link_layer"), roots.read(port / "rate")
        text = f"{state or 'no state'}, {link or 'no link layer'}, {rate or 'no rate'}, " \
               f"firmware {firmware}"
        if "ACTIVE" in state:
            found.append(Finding("mlx5", f"{device.name} port {port.name}", "ok", text))
            continue
        fix = ("a subnet manager (opensm) must run on this fabric" if "INIT" in state else
               "plug in the cable, or: ip link set the port's interface up")
        found.append(Finding("mlx5", f"{device.name} port {port.name}", "warn", text, fix))
    if found and not any(f.state == "ok" for f in found):
        found.append(Finding("mlx5", f"{device.name} link", "fail", "no port is active",
                             found[0].fix))
    return found


def _verbs(
    roots: Roots, device: Path, try_verbs: Callable[[str], dict[str, Any]]
) -> list[Finding]:
    """The device file, its permissions, opening it with 16 MiB registered, and our HCA on it."""
    numbers = sorted((device / "device/infiniband_verbs").glob("uverbs*"))
    file = roots.dev / "infiniband" / (numbers[0].name if numbers else "uverbs0")

    def finding(state: str, text: str, fix: str = "") -> list[Finding]:
        return [Finding("mlx5", f"{device.name} verbs", state, text, fix)]

    if not file.exists():
        return finding("fail", f"{file} is not there",
                       CONTAINER_FLAGS if roots.in_container else "modprobe ib_uverbs")
    if not os.access(file, os.R_OK | os.W_OK):
        return finding("fail", f"{file} may not be opened by this user",
                       f"sudo chmod 666 {file}, or join its group: sudo usermod -aG rdma $USER")
    facts = try_verbs(device.name)
    if facts.get("late"):
        return finding("unknown", "opening it took too long",
                       f"{MORE_TIME}; ibv_devinfo (does it hang too?)")
    if "error" in facts:
        missing = "No module named 'pyverbs'" in facts["error"]
        return finding("fail", facts["error"],
                       "apt-get install python3-pyverbs, in an environment that sees it "
                       "(python3 -m venv --system-site-packages)" if missing else
                       "ulimit -l unlimited; ibv_devinfo")
    return [*finding("ok", "opened, 16 MiB registered"),
            _opens(f"mlx5:{device.name}", facts["open_hca"])]


def _memlock() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= LOCKED_BYTES:
        size = "no limit" if soft == resource.RLIM_INFINITY else f"{soft >> 20} MiB"
        return Finding("mlx5", "locked memory", "ok", size)
    fix = "ulimit -l unlimited" if hard == resource.RLIM_INFINITY else \
        "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/rdma.conf, log in again"
    return Finding("mlx5", "locked memory", "fail", f"at most {soft >> 10} KiB", fix)


def _gpu_memory(roots: Roots) -> list[Finding]:
    """What lets an adapter reach GPU memory, and a GPU the adapter's doorbell."""
    driver = roots.read(roots.proc / "driver/nvidia/version")
    if not driver:
        return []
    modules = {line.split()[0] for line in roots.read(roots.proc / "modules").splitlines() if line}
    is_open = "Open Kernel Module" in driver
    if "nvidia_peermem" in modules:
        way = Finding("mlx5", "GPU memory", "ok", "nvidia-peermem is loaded")
    elif is_open:
        way = Finding("mlx5", "GPU memory", "ok", "open kernel modules: dmabuf")
    else:
        way = Finding("mlx5", "GPU memory", "fail", "neither dmabuf (open kernel modules) nor "
                      "nvidia-peermem", "sudo modprobe nvidia-peermem")
    parameters = roots.read(roots.proc / "driver/nvidia/params")
    words = re.search(r'^RegistryDwords:\s*"(.*)"', parameters, re.M)
    stream = re.search(r"^EnableStreamMemOPs:\s*(\d+)", parameters, re.M)
    missing = []
    if not stream or stream[1] != "1":
        missing.append("NVreg_EnableStreamMemOPs=1")
    if not words or "PeerMappingOverride=1" not in words[1]:
        missing.append('NVreg_RegistryDwords="PeerMappingOverride=1;"')
    if missing:
        doorbell = Finding(
            "mlx5", "doorbell from the GPU", "warn",
            f"the driver was loaded without {' '.join(missing)}: a CPU thread has to ring",
            f"echo 'options nvidia {' '.join(missing)}' | sudo tee /etc/modprobe.d/nvidia-rdma.conf"
            " && sudo update-initramfs -u, restart the machine",
        )
    else:
        doorbell = Finding("mlx5", "doorbell from the GPU", "ok", "the driver maps it")
    return [way, doorbell]
