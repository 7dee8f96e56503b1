"""Reference bytes from NVIDIA's GPUNetIO device headers (BSD-3), which ship in the NCCL wheel.

    pip install nvidia-nccl-cu13==2.32.3      (or the extra `oracles`)
    python -m tests.oracles.gpunetio          (writes gpunetio.json beside this file)

The headers are read from the installed wheel, or from the folder that GPUNETIO_HEADERS names. The
five functions of inline PTX that the writers use (byte swaps, a 16-byte store, the doorbell record)
are replaced by C in a copy; everything else is compiled as it is, by the host compiler.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
GOLDEN = HERE / "gpunetio.json"
WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
# Function of the headers -> what takes the place of its asm statement.
PTX = {
    "doca_gpu_dev_verbs_bswap64": "ret = __builtin_bswap64(x);",
    "doca_gpu_dev_verbs_bswap32": "ret = __builtin_bswap32(x);",
    "doca_gpu_dev_verbs_bswap16": "ret = __builtin_bswap16(x);",
    "doca_gpu_dev_verbs_store_wqe_seg": "ptr[0] = val[0]; ptr[1] = val[1];",
    "doca_gpu_dev_verbs_prepare_dbr": "dbrec_val = __builtin_bswap32(prod_index & 0xffff);",
}


def find_headers() -> tuple[Path, str] | None:
    """The doca_gpunetio folder and where it comes from, or None if no wheel is installed."""
    if folder := os.environ.get("GPUNETIO_HEADERS"):
        return Path(folder), folder
    for wheel in WHEELS:
        try:
            files = importlib.metadata.files(wheel) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        version = importlib.metadata.version(wheel)
        for file in files:
            if file.name == "doca_gpunetio_device.h":
                return Path(str(file.locate())).parent, f"{wheel} {version}"
    return None


def without_ptx(text: str) -> str:
    for function, statement in PTX.items():
        pattern = rf"(\b{function}\([^)]*\) \{{.*?)asm volatile\(.*?\);"
        text = re.sub(pattern, lambda m: m[1] + statement, text, count=1, flags=re.DOTALL)  # noqa: B023
    return text


def reference_bytes(headers: Path) -> dict[str, str]:
    """Hex bytes by name, as the headers' writers make them now. Raises CalledProcessError."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or "g++"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "doca_gpunetio"
        shutil.copytree(headers, copy)
        for file in copy.glob("device/*.cuh"):
            file.chmod(0o644)
            file.write_text(without_ptx(file.read_text()))
        program = Path(folder) / "dump"
        subprocess.run(
            [compiler, "-std=c++17", "-O1", "-w", f"-I{HERE / 'shim'}", f"-I{copy}",
             str(HERE / "gpunetio_dump.cpp"), "-o", str(program)],
            check=True, capture_output=True, text=True, timeout=100,
        )
        done = subprocess.run(
            [str(program)], check=True, capture_output=True, text=True, timeout=20
        )
    return dict(line.split(" ") for line in done.stdout.splitlines())


def main() -> int:
    found = find_headers()
    if found is None:
        print(__doc__)
        return 1
    golden = {
        "source": f"GPUNetIO device headers (BSD-3-Clause) of {found[1]}",
        "command": "pip install nvidia-nccl-cu13==2.32.3; python -m tests.oracles.gpunetio",
        "bytes": reference_bytes(found[0]),
    }
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
    print(f"{len(golden['bytes'])} byte strings from {found[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
