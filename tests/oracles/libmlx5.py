"""libmlx5 itself (rdma-core), with no device: its post_send on our rings, its poll_cq on our CQs.

    python -m tests.oracles.libmlx5 build FOLDER      (pip, cmake and a C compiler; half a minute)
    LIBMLX5_ORACLE=FOLDER/libmlx5_oracle.so pytest tests/oracles/test_libmlx5.py
    LIBMLX5_ORACLE=... python -m tests.oracles.libmlx5 golden    (writes libmlx5.json)

`build` fetches the source that the pyverbs sdist on PyPI holds, has rdma-core's own cmake lay out
its headers, and compiles the mlx5 provider's qp.c and cq.c with libmlx5_shim.c. Internal structures
move between releases, so the version is pinned. Nothing of it is copied into this repository.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tarfile
from ctypes import c_int, c_uint32, c_uint64, c_void_p
from pathlib import Path

from expertwire.hca.interface import QpInfo

HERE = Path(__file__).parent
GOLDEN = HERE / "libmlx5.json"
VERSION = "59.0"
ENVIRONMENT = "LIBMLX5_ORACLE"

# ibv_wr_opcode, ibv_send_flags (rdma-core verbs.h)
WRITE, WRITE_IMM, READ, COMPARE_SWAP, FETCH_ADD = 0, 1, 4, 5, 6
FENCE, SIGNALED, SOLICITED, INLINE = 1, 2, 4, 8


class _QueueMemory(ctypes.Structure):
    _fields_ = (
        ("sq", c_uint64), ("dbrec", c_uint64), ("doorbell", c_uint64), ("cq", c_uint64),
        ("cq_dbrec", c_uint64), ("qpn", c_uint32), ("num_wqe", c_uint32), ("num_cqe", c_uint32),
        ("blue_flame", c_uint32),
    )


class _Segment(ctypes.Structure):
    _fields_ = (("addr", c_uint64), ("length", c_uint32), ("lkey", c_uint32))


class Request(ctypes.Structure):
    """One work request: an ibv_send_wr."""

    _fields_ = (
        ("id", c_uint64), ("remote_addr", c_uint64), ("compare_add", c_uint64), ("swap", c_uint64),
        ("opcode", c_uint32), ("flags", c_uint32), ("rkey", c_uint32), ("imm_be", c_uint32),
        ("num_sge", c_uint32), ("reserved", c_uint32), ("sge", _Segment * 8),
    )


class Completion(ctypes.Structure):
    """What poll_cq says: an ibv_wc."""

    _fields_ = (
        ("id", c_uint64), ("status", c_uint32), ("vendor_err", c_uint32), ("opcode", c_uint32),
        ("byte_len", c_uint32), ("imm_be", c_uint32), ("qpn", c_uint32), ("flags", c_uint32),
        ("reserved", c_uint32),
    )


def request(opcode: int, remote_addr: int, rkey: int, data=(), **fields) -> Request:
    """data: (address, bytes, lkey) each; fields: id, flags, imm_be, compare_add, swap."""
    fields.setdefault("flags", SIGNALED)
    made = Request(opcode=opcode, remote_addr=remote_addr, rkey=rkey, num_sge=len(data), **fields)
    for entry, segment in zip(made.sge, data, strict=False):
        entry.addr, entry.length, entry.lkey = segment
    return made


class Libmlx5:
    """post_send and poll_cq for one queue pair whose memory is elsewhere."""

    def __init__(self, library: str, info: QpInfo, *, blue_flame: bool = False):
        self._call = ctypes.CDLL(library, mode=os.RTLD_LAZY)  # most of the provider is not linked
        self._call.oracle_open.restype = c_void_p
        for name in ("advance", "post", "poll", "close"):
            getattr(self._call, f"oracle_{name}").restype = c_int
        self._oracle = c_void_p(self._call.oracle_open(ctypes.byref(_QueueMemory(
            sq=info.sq_addr, dbrec=info.dbrec_addr, doorbell=info.uar_addr + 0x800,
            cq=info.cq_addr, cq_dbrec=info.cq_dbrec_addr, qpn=info.qpn, num_wqe=info.num_wqe,
            num_cqe=info.num_cqe, blue_flame=blue_flame,
        ))))

    def advance(self, index: int) -> None:
        """The next entry is posted at this index."""
        self._call.oracle_advance(self._oracle, c_uint32(index))

    def post(self, *requests: Request) -> None:
        """One call with a chain of requests: one doorbell. Raises OSError as post_send returns."""
        chain = (Request * len(requests))(*requests)
        if error := self._call.oracle_post(self._oracle, chain, c_uint32(len(requests))):
            raise OSError(error, f"post_send: {os.strerror(error)}")

    def poll(self, count: int = 64) -> list[Completion]:
        found = (Completion * count)()
        done = self._call.oracle_poll(self._oracle, found, c_uint32(count))
        assert done >= 0, "poll_cq does not understand a completion"
        return list(found[:done])

    def close(self) -> None:
        self._call.oracle_close(self._oracle)

    def __enter__(self) -> Libmlx5:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PlainQueue:
    """Memory of a queue pair with no HCA behind it; the queue number and keys are the test's."""

    def __init__(self, qpn: int, depth: int = 16):
        self._ring = (ctypes.c_uint8 * (depth * 64 + 64))()
        self._pages = (ctypes.c_uint8 * 8192)()
        self._cq = (ctypes.c_uint8 * 1024)(*[0xFF] * 1024)
        ring = -(-ctypes.addressof(self._ring) // 64) * 64
        pages = -(-ctypes.addressof(self._pages) // 4096) * 4096
        self.record, self._cq_record = (ctypes.c_uint8 * 8)(), (ctypes.c_uint8 * 8)()
        self.info = QpInfo(
            qpn=qpn, num_wqe=depth, num_cqe=16, sq_addr=ring, uar_addr=pages,
            dbrec_addr=ctypes.addressof(self.record), cq_addr=ctypes.addressof(self._cq),
            cq_dbrec_addr=ctypes.addressof(self._cq_record),
        )

    def blocks(self, idx: int, count: int) -> bytes:
        depth = self.info.num_wqe
        return b"".join(
            ctypes.string_at(self.info.sq_addr + (idx + i) % depth * 64, 64) for i in range(count))

    def put_completion(self, entry: int, raw: bytes) -> None:
        ctypes.memmove(self.info.cq_addr + 64 * entry, raw, 64)

    def register(self, at: int, num_bytes: int = 8) -> bytes:
        return ctypes.string_at(self.info.uar_addr + at, num_bytes)


def _run(*command: object) -> None:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=500,
                          check=False)
    if done.returncode:
        sys.exit(f"{command} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")


def build(folder: Path) -> Path:
    """Fetches, configures and compiles into `folder`; returns the library."""
    folder.mkdir(parents=True, exist_ok=True)
    _run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "pyverbs",
         f"pyverbs=={VERSION}", "-d", folder)
    with tarfile.open(folder / f"pyverbs-{VERSION}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    source = folder / f"pyverbs-{VERSION}" / "rdma-core"
    _run("cmake", "-S", source, "-B", folder / "headers", "-DNO_PYVERBS=1", "-DNO_MAN_PAGES=1",
         "-DENABLE_RESOLVE_NEIGH=0")
    _run("cmake", "--build", folder / "headers", "--target", "kern-abi")
    provider, library = source / "providers/mlx5", folder / "libmlx5_oracle.so"
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or "cc"
    _run(compiler, "-shared", "-fPIC", "-O1", "-w", "-std=gnu11", "-Wl,-z,lazy",
         f"-I{folder / 'headers/include'}", f"-I{provider}", provider / "qp.c", provider / "cq.c",
         HERE / "libmlx5_shim.c", "-o", library)
    return library


def golden_bytes(library: str) -> dict[str, str]:
    """Entries, doorbell record and register by name, as libmlx5 writes them now."""
    from tests.oracles.test_libmlx5 import REQUESTS, post_alone

    found = {}
    for name in REQUESTS:
        entry, record, register = post_alone(library, name)
        found[name] = entry.hex()
        found[f"{name} record"], found[f"{name} register"] = record.hex(), register.hex()
    return found


def main() -> int:
    match sys.argv[1:]:
        case ["build", folder]:
            print(build(Path(folder)))
        case ["golden"]:
            GOLDEN.write_text(json.dumps({
                "source": f"libmlx5 of rdma-core {VERSION} (GPL-2.0 or BSD), pyverbs sdist",
                "command": "python -m tests.oracles.libmlx5 build FOLDER; LIBMLX5_ORACLE="
                           "FOLDER/libmlx5_oracle.so python -m tests.oracles.libmlx5 golden",
                "bytes": golden_bytes(os.environ[ENVIRONMENT]),
            }, indent=1) + "\n")
        case _:
            print(__doc__)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
