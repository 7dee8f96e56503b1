"""One command for a machine with GPUs: named stages, each with a time limit, most valuable first.

    python3 tools/gpu_check.py [--out DIR] [--seconds 570] [--stages facts,build,compile,...]

A stage that is over prints one line of JSON (stage, code, seconds, what its program said last). One
that is not begun before --seconds have passed says so; one that is over its limit is ended with all
its processes. Logs of all stages are in DIR/gpu_check.log, the lines in DIR/stages.jsonl, what
processes took to start and to connect in DIR/times.txt. The last line has all stages; the exit code
is 1 if one failed or was not begun.

What fits in one run of 600 seconds, and what it tells; in brackets the seconds that are expected,
which limits exceed one and a half to three times. `facts,build,compile` [80] come first on a fresh
machine; with a cubin cache that the same NVRTC made elsewhere (EXPERTWIRE_CUBIN_CACHE) compile
takes none.

  two GPUs   facts,build,compile,bytes,trip,stages,ends,remote
                 bytes   [60]  every byte as on the CPU; send, echo, combine
                 trip    [120] trips beside bare kernels and NCCL, whole and cut into messages
                 stages  [30]  each launch of the real path by itself, for several block counts
                 ends    [60]  conformance between two processes over the HCA kernel
                 remote  [90]  a MoE layer there and here, two processes: the trip and at most 5 %
  two GPUs   facts,build,compile,gpus,two
                 gpus    [250] attention and experts on a GPU each: families, generate, openai,
                               failover
                 two     [150] the same bits between processes, work queues, what is killed
  two GPUs   facts,build,compile,scale,queues,overlap
                 scale   [200] clients and servers on all GPUs (any number of them)
                 queues  [40]  posting, the HCA kernel, rings in pinned memory
                 overlap [90]  two micro-batches in flight
  one GPU    facts,build,compile,bytes,local,hca,moe
                 local   [150] layers in one process, experts, failover in steps, faults, traces
                 hca     [90]  conformance and rings of the HCA kernel, pinned rings
                 moe     [150] experts at 1..512 rows beside grouped_mm and the memory's limit
  one GPU    facts,build,compile,memcheck,racecheck
                 [180 each] compute-sanitizer over the kernels of a step, fp8, failover, echo

Needs cmake, a C++ compiler, torch with CUDA, cuda-core, pytest and pytest-timeout; no network.
`openai` between GPUs needs the serving extra, too, and is skipped without.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "gpu_check"
# Concurrent streams share hardware queues by default, and a kernel that spins would block others'.
ENV = {
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]).strip(":"),
    "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1",
    "EXPERTWIRE_LIBRARY": str(BUILD / "libexpertwire.so"), "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
PYTEST = ["-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider", "-rfE",
          "--maxfail=20", "--durations=12"]
# cuda.core asks the driver for things that it may lack: not errors of device code.
SANITIZER = {"memcheck": ["--report-api-errors", "no"], "racecheck": []}
# Kernels of one stream only: under these tools no two of them run at the same time.
SANITIZED = [
    "tests/gpu/test_echo.py", "tests/gpu/test_failover.py", "tests/gpu/test_fp8.py",
    "tests/gpu/test_local.py", "tests/gpu/test_same_bytes.py", "tests/gpu/test_direct.py",
    "tests/gpu/test_ring.py", "-k",
    "(trip_after_trip or silent_servers or of_the_codes or gathered or a_layer or in_place or "
    "two_graphs or entries) and not own and not decode and not 64",
]

# Fails where there is no GPU: the tests would only be skipped.
GPU_FACTS = """
import sys, json, torch
from importlib.metadata import version
torch.zeros(1, device="cuda")
print(json.dumps({"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count(),
                  "torch": torch.__version__, "cuda": torch.version.cuda,
                  "python": sys.version.split()[0],
                  **{name: version(name) for name in ("cuda-core", "cuda-bindings", "triton",
                                                      "transformers", "pytest")}}))
"""


@dataclass(frozen=True)
class Stage:
    """limit: seconds for all commands together; gpus: how many it needs."""

    limit: float
    commands: list[list[str]]
    gpus: int = 1


def stages(python: str, arch: str) -> dict[str, Stage]:
    configure = ["cmake", "-S", str(ROOT), "-B", str(BUILD), "-DCMAKE_BUILD_TYPE=Release"]

    def tests(*what: str, timeout: int = 60) -> list[str]:
        return [python, *PYTEST, f"--timeout={timeout}", *what]

    def of_gpu(*names: str) -> list[str]:
        return tests(*[f"tests/gpu/test_{name}.py" for name in names])

    def bench(name: str, *more: str) -> list[list[str]]:
        return [[python, f"bench/{name}.py", *more]]

    def sanitized(tool: str) -> list[list[str]]:
        return [["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *SANITIZER[tool],
                 *tests(*SANITIZED, timeout=250)]]

    return {
        "facts": Stage(60, [["nvidia-smi"], ["nvidia-smi", "topo", "-m"],
                            [python, "-c", GPU_FACTS]]),
        "build": Stage(180, [configure, ["cmake", "--build", str(BUILD), "-j"]], gpus=0),
        "compile": Stage(150, [[python, "-m", "expertwire", "compile", "--arch", arch, "--json"]],
                         gpus=0),
        "bytes": Stage(180, [of_gpu("same_bytes", "echo", "direct", "fp8", "ring")]),
        "trip": Stage(240, bench("gpu_trip")),
        "ends": Stage(180, [tests("tests/system/test_hca_kernel_processes.py", "-k", "gpu",
                                  timeout=120)]),
        "remote": Stage(240, bench("gpu_remote")),
        "gpus": Stage(450, [of_gpu("two_gpus")], gpus=2),
        "two": Stage(350, [of_gpu("two_processes", "gpu_hca")]),
        "scale": Stage(350, bench("gpu_scale", "--svg", str(BUILD / "gpu_scale.svg"))),
        "stages": Stage(90, bench("gpu_stages")),
        "queues": Stage(90, bench("gpu_queues")),
        "overlap": Stage(150, bench("gpu_overlap")),
        "local": Stage(300, [of_gpu("local", "experts", "failover", "faults", "trace",
                                    "transformers", "doctor")]),
        "hca": Stage(200, [tests("tests/conformance", "-k", "gpu"),
                           of_gpu("gpu_hca", "pinned_ring", "mlx5")]),
        "moe": Stage(300, bench("gpu_moe")),
        "memcheck": Stage(270, sanitized("memcheck")),
        "racecheck": Stage(270, sanitized("racecheck")),
        "test": Stage(570, [tests("tests/gpu")]),
    }


DEFAULT = "facts,build,compile,bytes,trip,stages,ends,remote"


def run_command(command: list[str], log: Any, env: dict[str, str], limit: float) -> int:
    """Its exit code; 124 after the limit, 127 if there is no such program."""
    log.write(f"== {' '.join(command)}\n")
    log.flush()
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, text=True, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )
    except OSError as err:
        log.write(f"{command[0]} cannot be run: {err}\n")
        return 127
    try:
        return process.wait(max(1.0, limit))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return 124


def run_stage(name: str, stage: Stage, out: Path, limit: float) -> dict[str, Any]:
    """Runs the commands one after another; what they print goes to a log, its end to the screen."""
    start, code = time.monotonic(), 0
    env = {**os.environ, **ENV, "EXPERTWIRE_TEST_TIMES": str(out / "times.txt")}
    if name in SANITIZER:
        env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # each tensor its own allocation: bounds count
    path = BUILD / f"{name}.log"
    with open(path, "w") as log:
        for command in stage.commands:
            code = run_command(command, log, env, limit - (time.monotonic() - start))
            if code:
                break
    text = path.read_text(errors="replace")
    with open(out / "gpu_check.log", "a") as whole:
        whole.write(f"==== {name}\n{text}\n")
    for picture in BUILD.glob("*.svg") if out != BUILD else ():
        shutil.copy(picture, out)
    lines = text.strip().splitlines()
    print("\n".join(lines[-60 if code else -20 :]), flush=True)
    try:
        result = json.loads(lines[-1])
    except ValueError:
        result = lines[-1]
    return {"code": code, "seconds": round(time.monotonic() - start, 1), "result": result}


def visible_gpus() -> int:
    """As nvidia-smi lists them; 0 without it."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30,
                                check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=BUILD, help="folder for logs")
    parser.add_argument("--stages", default=DEFAULT, help=f"in order; default {DEFAULT}")
    parser.add_argument("--seconds", type=float, default=570, help="for all stages together")
    parser.add_argument("--arch", default="sm_90", help="architecture of the GPUs")
    parser.add_argument("--list", action="store_true", help="print the stages and their limits")
    options = parser.parse_args()
    table = stages(sys.executable, options.arch)
    names = options.stages.split(",")
    if unknown := set(names) - set(table):
        sys.exit(f"gpu_check: no stage named {', '.join(sorted(unknown))}; there are "
                 f"{', '.join(table)}")
    if options.list:
        for name, stage in table.items():
            print(f"{name:<10} at most {stage.limit:.0f} s, {stage.gpus} GPU: "
                  + "; ".join(" ".join(command) for command in stage.commands).replace("\n", " "))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    BUILD.mkdir(parents=True, exist_ok=True)
    start, num_gpus, results = time.monotonic(), visible_gpus(), {}
    for name in names:
        stage, left = table[name], options.seconds - (time.monotonic() - start)
        if stage.gpus > num_gpus:
            facts: dict[str, Any] = {"code": 1, "seconds": 0, "result": f"{num_gpus} GPUs are here"}
        elif left < 5:
            facts = {"code": 1, "seconds": 0, "result": "not begun: the time is over"}
        else:
            facts = run_stage(name, stage, options.out, min(stage.limit, left))
        results[name] = facts
        line = json.dumps({"stage": name, **facts})
        with open(options.out / "stages.jsonl", "a") as out:
            out.write(line + "\n")
        print(line, flush=True)
    if (times := options.out / "times.txt").exists():
        print(times.read_text()[-3000:])
    print(json.dumps({name: {key: facts[key] for key in ("code", "seconds")}
                      for name, facts in results.items()}))
    sys.exit(any(facts["code"] for facts in results.values()))


if __name__ == "__main__":
    main()
