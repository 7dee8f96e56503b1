"""Reference bytes from pyverbs (rdma-core): its segment writers, its reading of our completions.

    apt-get install python3-pyverbs
    python3 -m tests.oracles.pyverbs_oracle < completions.json > answers.json

Needs no device. Standard input: {"cqes": [hex, ...]}. Runs under any Python that has pyverbs, so it
imports nothing of this package. `python -m tests.oracles.test_pyverbs` makes pyverbs.json with it.
"""

from __future__ import annotations

import ctypes
import json
import sys


def main() -> int:
    import pyverbs.providers.mlx5.mlx5dv as mlx5

    cqes = json.load(sys.stdin)["cqes"]
    memory = (ctypes.c_uint8 * 128)()
    addr = ctypes.addressof(memory)
    entries = {}
    # Producer index, opcode, opmod, queue number, completion and fence flags, segments.
    for name, ctrl, data in (
        ("send", (1, 0x0A, 0, 0xABCDEF, 8, 2), [(4096, 0x11223344, 0x7F0011223344)]),
        ("send_wrapped", (0xFFFF, 0x0A, 0, 1, 0, 2), [(0x7FFFFFFF, 0xFFFFFFFF, (1 << 64) - 1)]),
        ("dump_two", (2, 0x23, 0, 0xFFFFFF, 8, 3), [(1, 2, 3), (100, 5, 6)]),
        ("opmod", (0x1234, 0x15, 9, 0x00FF00, 0x88, 1), []),
    ):
        ctypes.memset(addr, 0, 128)
        segments = [mlx5.WqeCtrlSeg(*ctrl), *(mlx5.WqeDataSeg(*d) for d in data)]
        wqe = mlx5.Wqe(segments, addr)
        entries[name] = bytes(memory[: 16 * len(segments)]).hex()
        del wqe
    answers = []
    for text in cqes:
        ctypes.memmove(addr, bytes.fromhex(text), 64)
        cqe = mlx5.Mlx5Cqe64(addr)
        answers.append({
            "opcode": cqe.opcode, "owner": cqe.owner, "wqe_counter": cqe.wqe_counter,
            "byte_count": cqe.byte_cnt, "imm": cqe.imm_inval_pkey, "empty": bool(cqe.is_empty()),
        })
    json.dump({"entries": entries, "cqes": answers}, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
