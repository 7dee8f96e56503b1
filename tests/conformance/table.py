"""The conformance checks by number, and the tests of each: python -m tests.conformance.table

Prints the table of docs/hca.md. A test's number is the one in its name.
"""

from __future__ import annotations

import ast
from pathlib import Path

FOLDER = Path(__file__).parent
BEGIN, END = "<!-- checks -->\n", "<!-- end of checks -->\n"
CHECKS = {
    1: "encoders agree, with the golden bytes too",
    2: "walking ones through every field",
    3: "keys are swapped once",
    4: "inline data, 1 to 256 bytes",
    5: "lengths in segments",
    6: "zero bytes",
    7: "bit 31 of a byte count",
    8: "doorbell forms",
    9: "word 1 of the doorbell record",
    10: "BlueFlame with whole entries; opcodes, undefined bytes",
    11: "the running index",
    12: "wrap at 2^16 and at 2^32",
    13: "end of the ring",
    14: "order of doorbells, old ones, all modes",
    15: "doorbells of two writers swapped",
    16: "nothing beyond the producer index",
    17: "jumps of the producer index",
    18: "fresh completion queue, quiet on it",
    19: "counter of an entry of several blocks",
    20: "completion modes",
    21: "collapsed completion queue",
    22: "owner bit, overrun",
    23: "quiet against a 64-bit model",
    24: "more than 65536 entries, more than 2^32",
    25: "fields of a completion",
    26: "no torn completion",
    27: "alignment, sizes, overlap",
    28: "chunks end where regions end",
    29: "more chunks than lanes",
    30: "atomics",
    31: "atomics under many queues",
    32: "misaligned atomics",
    33: "immediates and receives",
    34: "local keys",
    35: "remote keys",
    36: "length of a message",
    37: "keys revoked in flight",
    38: "nothing is written when a check fails",
    39: "states before RTS",
    40: "flush and syndromes",
    41: "lost peer",
    42: "reset",
    43: "queues are independent",
    44: "payload before flag",
    45: "many warps, no entry lost, doubled or early",
    46: "a reserver that never submits",
    47: "full ring",
    48: "the last message leaves",
    49: "quiet returns errors",
    50: "schedules and threads give the same memory",
}


def named_tests() -> dict[int, list[str]]:
    """Check -> names of its tests, as pytest collects them from this folder."""
    found: dict[int, list[str]] = {number: [] for number in CHECKS}
    for path in sorted(FOLDER.glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            number = node.name.split("_")[1]
            if not number.isdigit() or int(number) not in CHECKS:
                raise ValueError(f"{path.name}: {node.name} does not begin with a check's number")
            found[int(number)].append(node.name)
    return found


def table() -> str:
    lines = ["| number | check | tests |", "|--:|--|--|"]
    for number, names in named_tests().items():
        tests = ", ".join(f"`{name}`" for name in sorted(names))
        lines.append(f"| {number} | {CHECKS[number]} | {tests} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
