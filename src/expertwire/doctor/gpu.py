"""GPUs of this host, from what the `gpu` probe found: one by one, and which reach each other."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from .findings import MORE_TIME, Finding, Roots

LEAST_CAPABILITY = (7, 0)  # acquire and release of system scope
TESTED_CAPABILITY = (9, 0)
INSTALL = "pip install 'expertwire[gpu]'"
NVIDIA = "10de"


def gpu_findings(facts: dict[str, Any], roots: Roots, torch_cuda: str | None) -> list[Finding]:
    """facts: of probe.gpu. torch_cuda: CUDA version that torch was built for, None: for CPUs."""
    if facts.get("late"):
        return [Finding("gpu", "driver", "unknown", "the NVIDIA driver did not answer in time",
                        f"{MORE_TIME}; nvidia-smi (if that hangs too, reset the GPU or restart "
                        "the machine)")]
    if "error" in facts:
        return [Finding("gpu", "driver", "fail", facts["error"], "nvidia-smi")]
    if "no_driver" in facts or "no_device" in facts:
        return [_no_gpu(facts, roots)]
    cuda = facts["cuda"]
    found = [Finding("gpu", "driver", "ok", f"{len(facts['devices'])} GPUs, CUDA up to "
                                            f"{cuda // 1000}.{cuda % 1000 // 10}")]
    if "nvrtc_error" in facts:
        found.append(Finding("gpu", "nvrtc", "fail", facts["nvrtc_error"], INSTALL))
    else:
        found.append(Finding("gpu", "nvrtc", "ok", f"NVRTC {facts['nvrtc']}, cuda-core "
                                                   f"{facts['cuda_core']}"))
    if torch_cuda is None:
        found.append(Finding(
            "gpu", "torch", "fail", "this torch is built for CPUs only",
            "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
        ))
    else:
        found.append(Finding("gpu", "torch", "ok", f"built for CUDA {torch_cuda}"))
    return found + [_device(i, device) for i, device in enumerate(facts["devices"])]


def _no_gpu(facts: dict[str, Any], roots: Roots) -> Finding:
    why = facts.get("no_driver") or facts.get("no_device") or ""
    if "no_driver" in facts and not _has_card(roots):
        return Finding("gpu", "driver", "absent", "no NVIDIA GPU and no driver on this machine")
    if roots.in_container:
        fix = "docker run --gpus all ... (needs the NVIDIA container toolkit on the host)"
    elif "no_driver" in facts:
        fix = "install the NVIDIA driver, for example: apt-get install nvidia-open"
    else:
        fix = "nvidia-smi; unset CUDA_VISIBLE_DEVICES if it is empty; modprobe nvidia"
    return Finding("gpu", "driver", "fail", why, fix)


def _has_card(roots: Roots) -> bool:
    """Whether a PCI device is a display controller of NVIDIA's."""
    return any(
        roots.read(path / "vendor").endswith(NVIDIA) and roots.read(path / "class")[:4] == "0x03"
        for path in (roots.sys / "bus/pci/devices").glob("*")
    )


def _device(index: int, device: dict[str, Any]) -> Finding:
    capability = tuple(device["capability"])
    text = (f"{device['name']}, compute capability {capability[0]}.{capability[1]}, "
            f"{device['bytes'] / 2**30:.0f} GiB")
    name = f"gpu {index}"
    if capability < LEAST_CAPABILITY:
        return Finding("gpu", name, "fail", f"{text}: older than 7.0, which the device code needs",
                       "choose another GPU: export CUDA_VISIBLE_DEVICES=...")
    if "error" in device:
        return Finding("gpu", name, "fail", f"{text}: {device['error']}",
                       "nvidia-smi (is it in exclusive mode, or used up by another process?)")
    if "launch_us" not in device:
        return Finding("gpu", name, "unknown", f"{text}: no kernel was tried, for lack of time"
                       if device.get("skipped") else f"{text}: no kernel was tried without NVRTC",
                       "" if device.get("skipped") else INSTALL)
    text += f"; a kernel was compiled, ran and was right ({device['launch_us']} us)"
    if capability < TESTED_CAPABILITY:
        return Finding("gpu", name, "warn", f"{text}; tested from 9.0 on only")
    return Finding("gpu", name, "ok", text)


def is_there(roots: Roots) -> bool:
    """Whether there may be a GPU at all: a card on the bus, or a driver's files (WSL: dxg)."""
    files = (roots.dev / "nvidiactl", roots.dev / "dxg", roots.proc / "driver/nvidia/version")
    return _has_card(roots) or any(file.exists() for file in files)


def nvlink_findings(facts: dict[str, Any]) -> list[Finding]:
    """What reaches what. One line for all pairs that are alike."""
    if facts.get("late"):
        return [Finding("nvlink", "peer access", "unknown", "the GPUs did not answer in time",
                        MORE_TIME)]
    if "error" in facts:
        return [Finding("nvlink", "peer access", "fail", f"not tried: {facts['error']}",
                        "nvidia-smi")]
    count = len(facts.get("devices", ()))
    if count < 2:
        text = "one GPU" if count else "no GPU"
        return [Finding("nvlink", "peer access", "absent", f"{text}: nothing to reach")]
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for pair in facts["pairs"]:
        kinds.setdefault(_kind(pair), []).append(f"{pair['from']}-{pair['to']}")
    return [
        Finding("nvlink", "peer access", state, f"{text}: {_shorten(pairs)}", fix)
        for (state, text, fix), pairs in kinds.items()
    ]


def _kind(pair: dict[str, Any]) -> tuple[str, str, str]:
    if not pair["access"]:
        return ("fail", "no peer access", "nvidia-smi topo -p2p r (ACS in the BIOS, or IOMMU, may "
                "be in the way: amd_iommu=off, or iommu=pt)")
    if "error" in pair or pair.get("copied") is False:
        return ("fail", pair.get("error") or "a copied MiB arrived damaged",
                "nvidia-smi topo -p2p rw; dmesg | grep -i -e nvrm -e iommu")
    tried = ", a MiB copied" if pair.get("copied") else ", not tried for lack of time"
    if pair["atomics"]:
        return "ok", f"peer access with atomics, as over NVLink{tried}", ""
    return "warn", f"peer access without atomics, as over PCIe{tried}", "nvidia-smi nvlink --status"


def _shorten(pairs: list[str]) -> str:
    return ", ".join(pairs[:6]) + (f" and {len(pairs) - 6} more" if len(pairs) > 6 else "")


def torch_cuda_version() -> str | None:
    """What torch was built for, from its version.py: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.M)
    return found[1] if found else None
