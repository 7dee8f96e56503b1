"""One command for a machine with a GPU: builds, compiles, runs tests/gpu, times trips and layers.

    python3 tools/gpu_check.py [--out DIR] [--steps gpu,build,compile,test,hca,bench,moe,...]

Needs cmake, a C++ compiler, torch with CUDA, cuda-core and pytest; no network. Every step has a
time limit and is ended with all its processes when it is over. Logs go to DIR. The last line is
one JSON object; the exit code is 1 if a step failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "gpu_check"
# Concurrent streams share hardware queues by default, and a kernel that spins would block others'.
ENV = {
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]).strip(":"),
    "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1",
    "EXPERTWIRE_LIBRARY": str(BUILD / "libexpertwire.so"), "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}
PYTEST = ["-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider", "--timeout=60", "-rfE"]
# cuda.core asks the driver for things that it may lack: not errors of device code.
QUIET = {"memcheck": ["--report-api-errors", "no"], "racecheck": []}
SANITIZED = "(every_byte or in_place or two_graphs or entries) and not decode and not 64"

# Fails where there is no GPU: the tests would only be skipped.
GPU_FACTS = """
import sys, json, torch
from importlib.metadata import version
torch.zeros(1, device="cuda")
print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
                  "python": sys.version.split()[0], "cuda_core": version("cuda-core"),
                  "cuda_bindings": version("cuda-bindings")}))
"""


def steps(python: str) -> dict[str, tuple[float, list[list[str]]]]:
    """name: (seconds, commands)."""
    configure = ["cmake", "-S", str(ROOT), "-B", str(BUILD), "-DCMAKE_BUILD_TYPE=Release"]
    return {
        "build": (180, [configure, ["cmake", "--build", str(BUILD), "-j"]]),
        "gpu": (60, [["nvidia-smi"], [python, "-c", GPU_FACTS]]),
        "compile": (200, [[python, "-m", "expertwire", "compile", "--json"]]),
        "test": (420, [[python, *PYTEST, "tests/gpu", "--maxfail=20"]]),
        "two": (400, [[python, *PYTEST, "tests/gpu/test_two_processes.py",
                       "tests/gpu/test_two_gpus.py", "tests/gpu/test_gpu_hca.py",
                       "--maxfail=20"]]),
        "hca": (120, [[python, *PYTEST, "tests/conformance", "-k", "gpu", "--maxfail=20"]]),
        "bench": (240, [[python, "bench/gpu_trip.py"]]),
        "scale": (240, [[python, "bench/gpu_scale.py", "--svg", str(BUILD / "gpu_scale.svg")]]),
        "moe": (240, [[python, "bench/gpu_moe.py"]]),
        "overlap": (120, [[python, "bench/gpu_overlap.py"]]),
        "sanitize": (300, [
            ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *QUIET[tool],
             python, *PYTEST,
             "tests/gpu", "-k", SANITIZED, "--timeout=250"] for tool in ("memcheck", "racecheck")
        ]),
    }


def run_step(name: str, limit: float, commands: list[list[str]], out: Path) -> dict[str, Any]:
    """Runs the commands one after another; what they print goes to the screen and to a log."""
    start, code, text = time.monotonic(), 0, ""
    env = {**os.environ, **ENV}
    if name == "sanitize":
        env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # each tensor its own allocation: bounds count
    with open(out / f"{name}.log", "w") as log:
        for command in commands:
            print(f"== {name}: {' '.join(command)}", flush=True)
            try:
                process = subprocess.Popen(
                    command, cwd=ROOT, env=env, text=True, stdin=subprocess.DEVNULL,
                    stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                )
            except OSError as err:
                log.write(f"{command[0]} cannot be run: {err}\n")
                code = 127
                break
            try:
                code = process.wait(max(1, limit - (time.monotonic() - start)))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = 124
            if code:
                break
    text = (out / f"{name}.log").read_text(errors="replace")
    print("\n".join(text.splitlines()[-60 if code else -25 :]), flush=True)
    last = text.strip().splitlines()[-1] if text.strip() else ""
    facts: dict[str, Any] = {"code": code, "seconds": round(time.monotonic() - start, 1)}
    try:
        facts["result"] = json.loads(last)
    except ValueError:
        facts["result"] = last
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=BUILD, help="folder for logs")
    parser.add_argument("--steps", default="gpu,build,compile,test,hca,bench,moe,overlap",
                        help="what to run, in order; there are also sanitize, and two: "
                             "what is between processes, part of test, for machines with two GPUs")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    table = steps(sys.executable)
    names = options.steps.split(",")
    if unknown := set(names) - set(table):
        sys.exit(f"gpu_check: no step named {', '.join(sorted(unknown))}")
    results = {name: run_step(name, *table[name], options.out) for name in names}
    print(json.dumps(results))
    sys.exit(any(facts["code"] for facts in results.values()))


if __name__ == "__main__":
    main()
