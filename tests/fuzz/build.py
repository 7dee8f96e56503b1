"""Fuzzing with libFuzzer: the software HCA's entries, the server's request slots, UCX frames.

    python -m tests.fuzz.build wqe OUT        (clang; CLANGXX names another one)
    OUT -max_total_time=60 tests/fuzz/corpus/wqe

`python -m tests.fuzz.build corpus` writes the seeds of tests/fuzz/corpus anew: entries of the
oracles' golden bytes, a message as a client makes it, and frames of every kind. What a run finds is
minimised with `OUT -merge=1 tests/fuzz/corpus/wqe FOUND` and kept there. A crash is replayed with
`OUT FILE`.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import expertwire
from expertwire.device_structs import BufferHead
from expertwire.message import RequestLayout

HERE = Path(__file__).parent
NATIVE = Path(expertwire.__file__).parent
FIBERS = ("fiber*", "schedule.cpp", "history.cpp")
ENGINE = ("soft_*.cpp", "wire*.cpp", "trace.cpp", "error.cpp", *FIBERS)
SOURCES = {
    "wqe": (*ENGINE, "ucx_load.cpp"),
    "head": (*FIBERS, "error.cpp"),  # and rows.cpp
    "wire": ENGINE,
}
FLAGS = ["-std=c++20", "-g1", "-O1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all",
         "-fsanitize=fuzzer,address,undefined", "-D__SANITIZE_ADDRESS__=1", "-ffp-contract=off",
         "-pthread"]
LOCAL, REMOTE = bytes.fromhex("00007f0011223344"), bytes.fromhex("00007e00aabbccdd")


def compiler() -> str | None:
    """A clang that may have libFuzzer: CLANGXX, or the newest on the path."""
    names = ["clang++", *(f"clang++-{n}" for n in range(21, 13, -1))]
    return os.environ.get("CLANGXX") or next(filter(None, map(shutil.which, names)), None)


def rows_by_gcc(out: Path) -> Path:
    """rows.cpp by GCC: clang has _Float16 on x86 only from 15 on. Both speak to one ASan."""
    made = out.with_suffix(".rows.o")
    subprocess.run(
        ["g++", "-std=c++20", "-g1", "-O1", "-fsanitize=address", "-ffp-contract=off",
         "-Wno-unknown-pragmas", f"-I{NATIVE / 'device'}", f"-I{NATIVE / 'native'}",
         "-c", str(NATIVE / "native/rows.cpp"), "-o", str(made)],
        check=True, timeout=500,
    )
    return made


def build(target: str, out: Path) -> None:
    """Raises CalledProcessError with the compiler's words on standard error."""
    clang = compiler()
    if clang is None:
        sys.exit("no clang++ found (Debian: clang, libclang-rt-*-dev)")
    found = [f for pattern in SOURCES[target] for f in (NATIVE / "native").glob(pattern)]
    sources = [str(f) for f in found if f.suffix != ".hpp"]
    if target == "head":
        sources.append(str(rows_by_gcc(out)))
    subprocess.run(
        [clang, *FLAGS, f"-I{NATIVE / 'device'}", f"-I{NATIVE / 'native'}", "-Wno-unknown-pragmas",
         str(HERE / f"fuzz_{target}.cpp"), *sources, "-o", str(out)],
        check=True, timeout=500,
    )


def wqe_seeds() -> dict[str, bytes]:
    """Each golden entry, marks in place of its addresses and keys, and some together."""
    seeds = {}
    for oracle in ("gpunetio", "libmlx5"):
        golden = json.loads((HERE.parent / f"oracles/{oracle}.json").read_text())["bytes"]
        for name, text in golden.items():
            raw = bytes.fromhex(text)
            if len(raw) < 16 or "record" in name or "register" in name:
                continue
            for old, new in ((LOCAL, b"LL" + bytes(6)), (REMOTE, b"RR" + bytes(6)),
                             (bytes.fromhex("11223344"), b"\x11" * 4),
                             (bytes.fromhex("55667788"), b"\x22" * 4)):
                raw = raw.replace(old, new)
            raw = raw[: 16 * (raw[7] & 0x3F)]
            blocks = -(-len(raw) // 64)
            seeds[f"{oracle}_{name}".replace(" ", "_")] = bytes([7, blocks]) + raw.ljust(64, b"\0")
    bodies = [raw[2:].ljust(-(-len(raw[2:]) // 64) * 64, b"\0") for raw in seeds.values()]
    seeds["several"] = bytes([4, 10]) + b"".join(bodies)[: 16 * 64]
    return seeds


def head_seeds() -> dict[str, bytes]:
    seeds = {}
    for name, rows, top_k, element, fp8, control in (
        ("plain", 3, 2, 4, False, 0), ("fp8", 2, 4, 1, True, 0), ("fp8_wide", 2, 4, 1, True, 4),
    ):
        at = RequestLayout.of(rows, top_k, 24 * element, 2 if fp8 else 0)
        data = rows * top_k * 8 + rows * 24 * element + rows * 8 * fp8
        head = BufferHead(
            magic=0x51525745, version=1, head_bytes=128, seq=9, client_id=5, layer=1,
            hidden_size=24, data_type=4 if fp8 else 1, scale_type=fp8, scale_block=16 * fp8,
            num_rows=rows, experts_per_row=top_k, num_experts=7, reply_mode=1, reply_type=1,
            active_bytes=at.hidden_offset - 128, payload_bytes=at.end - at.hidden_offset,
            padding_bytes=at.end - 128 - data,
        )
        count = rows * top_k
        ids = (ctypes.c_int32 * count)(*[(1, 3, 4, -1)[i % 4] for i in range(count)])
        seeds[name] = bytes([control]) + bytes(head) + bytes(ids)
    return seeds


def wire_seeds() -> dict[str, bytes]:
    """Requests of every opcode, in and out of order; acknowledgements; responses."""
    key, region, queue = 0x22222222, 0x52520000 << 32, 0x11111111

    def frame(kind=1, acks=(), ops=(), data=b"", seq=0, total=0):
        head = struct.pack("<IBBBBQ16xIIIIQQQQ", 0x46575745, 2, kind, len(ops), len(acks), 0,
                           queue, 0x77, 0, 0, seq, 0, total, 0)
        raw = head + b"".join(acks) + b"".join(ops)
        return bytes([len(raw) // 4, len(data) // 4]) + raw + data

    def op(opcode, num_bytes=0, total=0, opmod=0, at=0):
        return struct.pack("<BBBBIIIQQQ", opcode, opmod, 1, 1, 0, key, num_bytes, region + at,
                           total or num_bytes, 0)

    def ack(next_idx, syndrome=0):
        return struct.pack("<IIQII", queue, 0, next_idx, syndrome, 0)

    ops = {
        "write": (op(8, 64), bytes(64)), "immediate": (op(9, 8), bytes(8)),
        "read": (op(16, total=128), b""), "nop": (op(0), b""),
        "swap": (op(17, 16), bytes(16)), "add": (op(18, 16), bytes(16)),
        "masked_swap": (op(20, 32, opmod=9), bytes(32)),
        "masked_add": (op(21, 16, opmod=9), bytes(16)),
    }
    frames = {name: frame(ops=[entry], data=data) for name, (entry, data) in ops.items()}
    frames["together"] = frame(ops=[e for e, _ in ops.values()],
                               data=b"".join(d for _, d in ops.values()))
    frames["reordered"] = (frame(ops=[op(8, 8, at=8)], data=bytes(8), seq=1)
                           + frame(ops=[op(8, 8)], data=bytes(8)))
    done = frame(acks=[ack(1)])
    frames["finished"] = (done + frame(2, seq=1, data=bytes(64), total=64)
                          + frame(2, seq=2, data=bytes(8), total=8) + frame(acks=[ack(3)]))
    frames["refused"] = done + frame(acks=[ack(1, syndrome=0x13)])
    return {name: bytes([2]) + raw for name, raw in frames.items()}


def main() -> int:
    match sys.argv[1:]:
        case ["corpus"]:
            for target, seeds in (("wqe", wqe_seeds()), ("head", head_seeds()),
                                  ("wire", wire_seeds())):
                for name, raw in seeds.items():
                    (HERE / "corpus" / target / name).write_bytes(raw)
        case [target, out] if target in SOURCES:
            build(target, Path(out))
        case _:
            print(__doc__)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
