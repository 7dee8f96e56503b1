"""The same .cuh files compile for GPUs (nvcc; no GPU needed) as for the CPU."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from expertwire.cuda.compile import Cubin, compile_device_code
from expertwire.cuda.launch import WIDE_KERNELS
from expertwire.cuda.source import DEVICE, device_source
from expertwire.device_structs import KERNEL_ARGS


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_kernels_compile_for_gpus(arch, tmp_path):
    source = tmp_path / "all.cu"
    source.write_text(device_source())
    done = subprocess.run(
        ["nvcc", "-std=c++17", f"-arch={arch}", "-cubin", str(source), "-o",
         str(tmp_path / "all.cubin")], capture_output=True, text=True, timeout=110, check=False,
    )
    assert done.returncode == 0, done.stderr
    cubin = Cubin(arch, (tmp_path / "all.cubin").read_bytes(), False, 0.0)
    assert set(cubin.kernels()) == set(KERNEL_ARGS)


def test_nvrtc_compiles_without_a_gpu(tmp_path):
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    first = compile_device_code("sm_90", tmp_path)
    assert set(first.kernels()) == set(KERNEL_ARGS) and not first.cached
    again = compile_device_code("sm_90", tmp_path)
    assert again.cached and again.code == first.code


def test_launches_know_which_kernels_take_eight_warps_at_most():
    found = set(re.findall(r"^EW_WIDE_KERNEL\((\w+),", device_source(), re.MULTILINE))
    assert found == WIDE_KERNELS


def test_only_target_cuh_has_branches():
    """One source for both targets: no other device file has a preprocessor branch or PTX."""
    for file in DEVICE.glob("*.cuh"):
        text = file.read_text()
        if file.name != "target.cuh":
            assert "#if" not in text, file.name
        if file.name != "target_gpu.cuh":
            assert "asm" not in text, file.name
