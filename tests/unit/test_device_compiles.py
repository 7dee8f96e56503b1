"""The same .cuh files compile for GPUs (nvcc; no GPU needed) as for the CPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import expertwire

DEVICE = Path(expertwire.__file__).with_name("device")
KERNELS = [
    "client_combine", "client_pack", "client_put", "client_route", "device_checks",
    "server_gather", "server_poll", "server_reply",
]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_kernels_compile_for_gpus(arch, tmp_path):
    source = tmp_path / "all.cu"
    source.write_text("".join(f'#include "{name}.cuh"\n' for name in KERNELS))
    done = subprocess.run(
        ["nvcc", "-std=c++17", f"-arch={arch}", "-cubin", f"-I{DEVICE}", str(source), "-o",
         str(tmp_path / "all.cubin")], capture_output=True, text=True, timeout=110, check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "all.cubin").stat().st_size > 10_000


def test_only_target_cuh_has_branches():
    """One source for both targets: no other device file has a preprocessor branch or PTX."""
    for file in DEVICE.glob("*.cuh"):
        text = file.read_text()
        if file.name != "target.cuh":
            assert "#if" not in text, file.name
        if file.name != "target_gpu.cuh":
            assert "asm" not in text, file.name
