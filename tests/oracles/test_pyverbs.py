"""Ctrl and data segments, and the reading of completions, against pyverbs (rdma-core).

    python -m tests.oracles.test_pyverbs      (writes pyverbs.json beside this file)

PYVERBS_PYTHON: an interpreter with pyverbs, default /usr/bin/python3 (Debian's python3-pyverbs);
PYVERBS_PATH: where its modules are, if not where that interpreter looks.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

from expertwire.hca.wqe import Cqe, DataSegment, Wqe
from tests.conformance.rig import NOP, WRITE_IMM, Rig
from tests.oracles import unavailable

GOLDEN = Path(__file__).with_name("pyverbs.json")
ROOT = Path(__file__).parents[2]
ENTRIES = {
    "send": Wqe(0x0A, 1, 0xABCDEF, data=(DataSegment(4096, 0x11223344, 0x7F0011223344),)),
    "send_wrapped": Wqe(
        0x0A, 0xFFFF, 1, fm_ce_se=0, data=(DataSegment(0x7FFFFFFF, 0xFFFFFFFF, (1 << 64) - 1),)),
    "dump_two": Wqe(0x23, 2, 0xFFFFFF, data=(DataSegment(1, 2, 3), DataSegment(100, 5, 6))),
    "opmod": Wqe(0x15, 0x1234, 0x00FF00, opmod=9, fm_ce_se=0x88, num_segments=1),
}


def our_completions() -> list[bytes]:
    """What the software HCA writes: untouched, good, second round of a ring, immediate, errors."""
    found = []
    with Rig(16, num_cqe=16, cq_flags=2) as rig:
        found.append(rig.raw_cqe(3))
        rig.do(rig.write(num_bytes=4096), *[rig.wqe(NOP) for _ in range(15)])
        found += [rig.raw_cqe(0), rig.raw_cqe(15)]
        rig.do(rig.inline(0, b"x" * 28), rig.inline(0, b"x" * 100))
        found += [rig.raw_cqe(0), rig.raw_cqe(1)]
        rig.window.post_recv(1)
        rig.do(rig.write(opcode=WRITE_IMM, imm=0x01020304, num_bytes=77))
        receive = rig.window.poll_recv()
        assert receive is not None
        found += [receive, rig.raw_cqe(2)]
        rig.do(rig.write(rkey=rig.rkey ^ 1), rig.wqe(NOP))
        found += [rig.raw_cqe(3), rig.raw_cqe(4)]
    return found


@functools.cache
def ask_pyverbs() -> dict | None:
    """Its answers now, or None where no interpreter has it."""
    python = os.environ.get("PYVERBS_PYTHON", "/usr/bin/python3")
    environment = {**os.environ, "PYTHONPATH": os.environ.get("PYVERBS_PATH", "")}
    try:
        probe = subprocess.run([python, "-c", "import pyverbs.providers.mlx5.mlx5dv"], timeout=30,
                               env=environment, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    if probe.returncode != 0:
        return None
    question = json.dumps({"cqes": [raw.hex() for raw in our_completions()]})
    done = subprocess.run([python, str(ROOT / "tests/oracles/pyverbs_oracle.py")], input=question,
                          env=environment, capture_output=True, text=True, timeout=30, check=True)
    return json.loads(done.stdout)


def check(answers: dict, completions: list[bytes]) -> None:
    assert answers["entries"] == {name: wqe.encode().hex() for name, wqe in ENTRIES.items()}
    assert len(answers["cqes"]) == len(completions)
    for theirs, raw in zip(answers["cqes"], completions, strict=True):
        ours = Cqe.decode(raw)
        assert theirs == {
            "opcode": ours.opcode, "owner": ours.owner, "wqe_counter": ours.wqe_counter,
            "byte_count": ours.byte_count, "imm": ours.imm, "empty": False,
        }


def test_committed_answers():
    golden = json.loads(GOLDEN.read_text())
    assert [raw.hex() for raw in our_completions()] == golden["completions"], "ours changed"
    check(golden["answers"], [bytes.fromhex(text) for text in golden["completions"]])


def test_completions_say_what_happened():
    """The committed ones are not just consistent: these are the events of `our_completions`."""
    read = [Cqe.decode(raw) for raw in our_completions()]
    assert [(c.opcode, c.owner, c.wqe_counter) for c in read] == [
        (15, 1, 0xFFFF), (0, 0, 0), (0, 0, 15), (0, 1, 16), (0, 1, 17), (1, 0, 0), (0, 1, 20),
        (13, 1, 21), (13, 1, 22),
    ]
    assert [c.byte_count for c in read[1:7]] == [4096, 0, 28, 100, 77, 77]
    assert [c.syndrome for c in read[7:]] == [0x13, 0x05] and read[5].imm == 0x01020304


def test_pyverbs_itself(request):
    answers = ask_pyverbs()
    if answers is None:
        unavailable(request, "no Python with pyverbs (Debian: python3-pyverbs)")
    check(answers, our_completions())


if __name__ == "__main__":
    fresh = ask_pyverbs()
    if fresh is None:
        sys.exit(__doc__)
    GOLDEN.write_text(json.dumps({
        "source": "pyverbs 44.0-2 of Debian 12 (rdma-core, GPL-2.0 or BSD)",
        "command": "apt-get install python3-pyverbs; python -m tests.oracles.test_pyverbs",
        "completions": [raw.hex() for raw in our_completions()], "answers": fresh,
    }, indent=1) + "\n")
