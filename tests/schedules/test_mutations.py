"""Proof that the schedules can fail: planted bugs, each of which some seed notices.

Every mutation is a textual patch on a copy of device/, built into a library of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import expertwire
from tests.schedules.mutations import MUTATIONS
from tests.schedules.replay import command

PACKAGE = Path(expertwire.__file__).parent
ROOT = Path(__file__).parents[2]
FLAGS = [
    "-std=c++20", "-O1", "-fPIC", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off",
    "-fvisibility=hidden", "-pthread", "-Wno-unknown-pragmas",
]
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="planted bugs need a C++ compiler"),
    pytest.mark.timeout(600),  # the first one compiles the whole library
]


def run(*arguments, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(a) for a in arguments], capture_output=True, text=True, timeout=500, check=False,
        **options,
    )


def compile_to(target: Path, source: Path, device: Path) -> None:
    includes = [f"-I{device}", f"-I{PACKAGE / 'native'}"]
    done = run(COMPILER, *FLAGS, *includes, "-c", source, "-o", target)
    assert done.returncode == 0, done.stderr


def build(folder: Path, device: Path, objects: list[Path]) -> Path:
    """kernels.cpp over `device`, linked with everything else as it is."""
    compile_to(folder / "kernels.o", PACKAGE / "native/kernels.cpp", device)
    library = folder / "libexpertwire.so"
    done = run(COMPILER, "-shared", "-pthread", *objects, folder / "kernels.o", "-o", library)
    assert done.returncode == 0, done.stderr
    return library


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """All of the library but the kernels, compiled once."""
    folder = tmp_path_factory.mktemp("objects")
    sources = [*(PACKAGE / "native").glob("*.cpp"), *(PACKAGE / "native").glob("*.S")]
    targets = []
    for source in sources:
        if source.name != "kernels.cpp":
            targets.append(folder / f"{source.name}.o")
            compile_to(targets[-1], source, PACKAGE / "device")
    return targets


def replay(library: Path, scenario: str, seeds: int) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(PACKAGE.parent), str(ROOT)])
    environment = {**os.environ, "EXPERTWIRE_LIBRARY": str(library), "PYTHONPATH": path}
    return run(sys.executable, "-m", "tests.schedules.replay", scenario, 0, seeds, cwd=ROOT,
               env=environment)


def test_without_a_bug_no_seed_fails(objects, tmp_path):
    """The same build and the same seeds, nothing planted."""
    library = build(tmp_path, PACKAGE / "device", objects)
    for scenario in sorted({m.scenario for m in MUTATIONS}):
        seeds = max(m.seeds for m in MUTATIONS if m.scenario == scenario)
        done = replay(library, scenario, seeds)
        assert done.returncode == 0, done.stdout[-500:] + done.stderr[-500:]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_planted_bug_is_noticed(mutation, objects, tmp_path):
    device = tmp_path / "device"
    shutil.copytree(PACKAGE / "device", device)
    text = (device / mutation.file).read_text()
    assert text.count(mutation.old) == 1, "this mutation no longer applies: adapt its text"
    (device / mutation.file).write_text(text.replace(mutation.old, mutation.new))
    done = replay(build(tmp_path, device, objects), mutation.scenario, mutation.seeds)
    last = (done.stdout.strip().splitlines() or ["nothing ran"])[-1]
    # Status 1 and the seed: a promise was broken. A signal during a seed: the device code crashed
    # or broke a contract. Anything else (a library that does not load, say) is no proof.
    noticed = done.returncode == 1 and last.startswith("failed: seed")
    assert noticed or (done.returncode < 0 and last.startswith("seed")), (
        f"{mutation.seeds} seeds did not notice; {command(mutation.scenario, 0)} {mutation.seeds} "
        f"ended with {done.returncode}: {done.stderr[-500:]}"
    )
    print(f"{mutation.name}: {last} (status {done.returncode})")
