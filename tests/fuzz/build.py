"""Fuzzing with libFuzzer: the software HCA's entries, the server's request slots.

    python -m tests.fuzz.build wqe OUT        (clang; CLANGXX names another one)
    OUT -max_total_time=60 tests/fuzz/corpus/wqe

`python -m tests.fuzz.build corpus` writes the seeds of tests/fuzz/corpus anew: entries of the
oracles' golden bytes, and a message as a client makes it. What a run finds is minimised with
`OUT -merge=1 tests/fuzz/corpus/wqe FOUND` and kept there. A crash is replayed with `OUT FILE`.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import expertwire
from expertwire.device_structs import BufferHead
from expertwire.message import RequestLayout

HERE = Path(__file__).parent
NATIVE = Path(expertwire.__file__).parent
SOURCES = {
    "wqe": ("soft_*.cpp", "wire*.cpp", "ucx_load.cpp", "trace.cpp", "error.cpp"),
    "head": ("fiber*", "schedule.cpp", "error.cpp"),
}
FLAGS = ["-std=c++20", "-g", "-O1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all",
         "-fsanitize=fuzzer,address,undefined", "-D__SANITIZE_ADDRESS__=1", "-ffp-contract=off",
         "-pthread"]
LOCAL, REMOTE = bytes.fromhex("00007f0011223344"), bytes.fromhex("00007e00aabbccdd")


def compiler() -> str | None:
    """A clang that may have libFuzzer: CLANGXX, or the newest on the path."""
    names = ["clang++", *(f"clang++-{n}" for n in range(21, 13, -1))]
    return os.environ.get("CLANGXX") or next(filter(None, map(shutil.which, names)), None)


def build(target: str, out: Path) -> None:
    """Raises CalledProcessError with the compiler's words on standard error."""
    clang = compiler()
    if clang is None:
        sys.exit("no clang++ found (Debian: clang, libclang-rt-*-dev)")
    found = [f for pattern in SOURCES[target] for f in (NATIVE / "native").glob(pattern)]
    sources = [str(f) for f in found if f.suffix != ".hpp"]
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
    for name, rows, top_k, element, fp8 in (("plain", 3, 2, 4, False), ("fp8", 2, 4, 1, True)):
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
        seeds[name] = bytes([0]) + bytes(head) + bytes(ids)
    return seeds


def main() -> int:
    match sys.argv[1:]:
        case ["corpus"]:
            for target, seeds in (("wqe", wqe_seeds()), ("head", head_seeds())):
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
