"""Proof that the schedules can fail: planted bugs, each of which some seed notices.

Every mutation is a textual patch on a copy of device/ and native/, built into a library of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import expertwire
from tests.schedules.mutations import MUTATIONS
from tests.schedules.mutations_rounds import MUTATIONS as ROUNDS
from tests.schedules.replay import command

PACKAGE = Path(expertwire.__file__).parent
MUTATIONS = [*MUTATIONS, *ROUNDS]
ROOT = Path(__file__).parents[2]
FLAGS = [
    "-std=c++20", "-O0", "-fPIC", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off",
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


def compile_to(target: Path, source: Path, device: Path, *more: str) -> None:
    includes = [f"-I{device}", f"-I{PACKAGE / 'native'}"]
    done = run(COMPILER, *FLAGS, *more, *includes, "-c", source, "-o", target)
    assert done.returncode == 0, done.stderr


def build(folder: Path, device: Path, objects: list[Path], changed: Path | None = None) -> Path:
    """kernels.cpp over `device`, and `changed`, linked with everything else as it is."""
    if changed is not None:
        compile_to(folder / f"{changed.name}.o", changed, device)
        objects = [o for o in objects if o.name != f"{changed.name}.o"]
        objects.append(folder / f"{changed.name}.o")
    # Not optimised: the seeds take less time than the optimiser.
    compile_to(folder / "kernels.o", PACKAGE / "native/kernels.cpp", device, "-O0")
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


class Replay:
    """python -m tests.schedules.replay --serve"""

    def __init__(self, folder: Path):
        self.output = folder / "replay.txt"
        path = os.pathsep.join([str(PACKAGE.parent), str(ROOT)])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.schedules.replay", "--serve"], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path},
        )

    def run(self, library: Path, scenario: str, seeds: int) -> tuple[int, str]:
        """Exit status, negative for a signal, and what it printed."""
        assert self.process.stdin and self.process.stdout
        line = json.dumps([str(library), scenario, seeds, str(self.output)])
        print(line, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, f"the replaying process ended with status {self.process.wait(10)}"
        return int(answer), self.output.read_text()

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


@pytest.fixture(scope="session")
def replay(tmp_path_factory: pytest.TempPathFactory):
    server = Replay(tmp_path_factory.mktemp("replay"))
    yield server
    server.close()


def test_without_a_bug_no_seed_fails(objects, replay, tmp_path):
    """The same build and the same seeds, nothing planted."""
    library = build(tmp_path, PACKAGE / "device", objects)
    for scenario in sorted({m.scenario for m in MUTATIONS}):
        seeds = max(m.seeds for m in MUTATIONS if m.scenario == scenario)
        status, text = replay.run(library, scenario, seeds)
        assert status == 0, text[-1000:]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mutation" in metafunc.fixturenames:
        some = MUTATIONS[::3]
        wanted = {"some": some, "rest": [m for m in MUTATIONS if m not in some], "all": MUTATIONS}
        chosen = wanted[metafunc.config.getoption("--planted-bugs")]
        metafunc.parametrize("mutation", chosen, ids=lambda m: m.name)


def test_planted_bug_is_noticed(mutation, objects, replay, tmp_path):
    device = tmp_path / "device"
    for part in ("device", "native"):
        shutil.copytree(PACKAGE / part, tmp_path / part)
    file = (device / mutation.file).resolve()
    text = file.read_text()
    assert text.count(mutation.old) == 1, "this mutation no longer applies: adapt its text"
    file.write_text(text.replace(mutation.old, mutation.new))
    library = build(tmp_path, device, objects, file if file.suffix == ".cpp" else None)
    status, text = replay.run(library, mutation.scenario, mutation.seeds)
    last = (text.strip().splitlines() or ["nothing ran"])[-1]
    # Status 1 and the seed: a promise was broken. A signal during a seed: the device code crashed
    # or broke a contract. Anything else (a library that does not load, say) is no proof, nor is a
    # run that did not come to an end.
    noticed = status == 1 and last.startswith("failed: seed")
    crashed = status < 0 and status != -signal.SIGALRM and "seed" in text
    assert noticed or crashed, (
        f"{mutation.seeds} seeds did not notice; {command(mutation.scenario, 0)} {mutation.seeds} "
        f"ended with {status}: {text[-500:]}"
    )
    print(f"{mutation.name}: {last} (status {status})")
