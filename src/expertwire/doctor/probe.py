"""Checks that run in a process of their own: drivers may hang, torch takes seconds to import, and
UCX installs handlers. `python -m expertwire.doctor.probe NAME` prints one JSON object."""

from __future__ import annotations

import ctypes
import itertools
import json
import sys
import time
from typing import Any

COUNT = 256
SOURCE = r"""
extern "C" __global__ void probe(unsigned* out) {
  unsigned sum = threadIdx.x;
  for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  out[threadIdx.x] = sum + threadIdx.x;
}
"""
PEER_BYTES = 1 << 20


def expected_words() -> list[int]:
    """What `probe` writes: the sum of its warp's thread numbers, and its own."""
    warps = [sum(range(32 * w, 32 * w + 32)) for w in range(COUNT // 32)]
    return [warps[i // 32] + i for i in range(COUNT)]


def reached(what: str) -> None:
    """For whoever has to end this process before its time."""
    print(json.dumps({"reached": what}), flush=True)


# -------------------------------------------------------------------- a whole trip


def job() -> dict[str, Any]:
    """Registry, server and client in this process: a batch there and back."""
    reached("importing torch")
    import torch

    reached("torch was imported; importing the client and the server")

    from ..client.client import Client
    from ..registry.registry import Registry
    from ..server.echo import EchoShard, echo_model
    from ..server.server import Server

    token = b"a token of the doctor's own"
    model = echo_model(64, "float32")
    reached("torch was imported; connecting")
    with Registry("127.0.0.1:0", token=token) as registry, \
            Server(EchoShard(), model, registry, token=token), \
            Client(registry, token=token) as client:
        client.wait_ready(5)
        hidden = torch.arange(8 * 64, dtype=torch.float32).view(8, 64)
        ids, weights = torch.zeros(8, 1, dtype=torch.int64), torch.ones(8, 1)
        begin = time.perf_counter()
        out = client.moe(0, hidden, ids, weights)
        seconds = time.perf_counter() - begin
        return {"equal": bool(torch.equal(out, hidden)), "us": round(seconds * 1e6),
                "torch": torch.__version__}


# -------------------------------------------------------------------- GPUs, without torch


class Driver:
    """The few calls of libcuda that are needed here. Raises RuntimeError with the error's name."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *arguments: Any) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorName(code, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'error').decode()} ({code})")

    def value(self, name: str, *arguments: Any, kind: Any = ctypes.c_int) -> Any:
        """What a call writes through its first argument."""
        out = kind()
        self(name, ctypes.byref(out), *arguments)
        return out.value


def gpu(budget: str = "3.0") -> dict[str, Any]:
    """Devices, a kernel on each, and what reaches what. budget: seconds for all of it."""
    end = time.monotonic() + float(budget)
    facts: dict[str, Any] = {"devices": [], "pairs": []}
    try:
        driver = Driver()
    except OSError as err:
        return {**facts, "no_driver": str(err)}
    try:
        driver("cuInit", 0)
        facts["cuda"] = driver.value("cuDriverGetVersion")
        count = driver.value("cuDeviceGetCount")
    except RuntimeError as err:
        return {**facts, "no_device": str(err)}
    facts |= nvrtc_facts()
    contexts: list[int] = []
    for i in range(count):
        device = device_facts(driver, i)
        facts["devices"].append(device)
        if time.monotonic() > end:
            device["skipped"] = True
            continue
        try:
            contexts.append(driver.value("cuDevicePrimaryCtxRetain", i, kind=ctypes.c_void_p))
            if "nvrtc_error" not in facts:
                device["launch_us"] = launch(driver, contexts[-1], device["capability"])
        except Exception as err:
            device["error"] = f"{type(err).__name__}: {err}"
    for a, b in itertools.permutations(range(count), 2):
        facts["pairs"].append(pair_facts(driver, a, b, contexts if time.monotonic() < end else []))
    return facts


def device_facts(driver: Driver, device: int) -> dict[str, Any]:
    name = ctypes.create_string_buffer(128)
    driver("cuDeviceGetName", name, 128, device)
    major, minor = (driver.value("cuDeviceGetAttribute", a, device) for a in (75, 76))
    dmabuf = driver.value("cuDeviceGetAttribute", 124, device)  # DMA_BUF_SUPPORTED
    return {"name": name.value.decode(), "capability": [major, minor], "dmabuf": bool(dmabuf),
            "bytes": driver.value("cuDeviceTotalMem_v2", device, kind=ctypes.c_size_t)}


def nvrtc_facts() -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    try:
        from ..cuda.compile import nvrtc_version, require

        require("cuda.core")
        return {"nvrtc": nvrtc_version(), "cuda_core": version("cuda-core")}
    except PackageNotFoundError:
        return {"nvrtc": nvrtc_version(), "cuda_core": "?"}
    except Exception as err:
        return {"nvrtc_error": str(err)}


def launch(driver: Driver, context: int, capability: list[int]) -> int:
    """Compiles, runs and checks a kernel; microseconds of launch and copy back."""
    from ..cuda.compile import require

    major, minor = capability
    core = require("cuda.core")
    options = core.ProgramOptions(arch=f"sm_{major}{minor}", name="probe.cu")
    cubin = bytes(core.Program(SOURCE, "c++", options).compile("cubin").code)
    driver("cuCtxSetCurrent", ctypes.c_void_p(context))
    module = driver.value("cuModuleLoadData", cubin, kind=ctypes.c_void_p)
    function = driver.value("cuModuleGetFunction", ctypes.c_void_p(module), b"probe",
                            kind=ctypes.c_void_p)
    out = ctypes.c_uint64(driver.value("cuMemAlloc_v2", ctypes.c_size_t(4 * COUNT),
                                       kind=ctypes.c_uint64))
    words = (ctypes.c_uint32 * COUNT)()
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(out))
    begin = time.perf_counter()
    driver("cuLaunchKernel", ctypes.c_void_p(function), 1, 1, 1, COUNT, 1, 1, 0, None, arguments,
           None)
    driver("cuMemcpyDtoH_v2", words, out, ctypes.c_size_t(4 * COUNT))
    seconds = time.perf_counter() - begin
    driver("cuMemFree_v2", out)
    if list(words) != expected_words():
        raise RuntimeError("the kernel ran and wrote something else than it should")
    return round(seconds * 1e6)


def pair_facts(driver: Driver, a: int, b: int, contexts: list[int]) -> dict[str, Any]:
    """Whether GPU a reaches the memory of b, tried with a copy when there is time."""
    facts: dict[str, Any] = {"from": a, "to": b}
    facts["access"] = bool(driver.value("cuDeviceCanAccessPeer", a, b))
    if facts["access"]:
        # NATIVE_ATOMIC_SUPPORTED: over NVLink, not over PCIe
        facts["atomics"] = bool(driver.value("cuDeviceGetP2PAttribute", 3, a, b))
        try:
            if max(a, b) < len(contexts):
                facts["copied"] = copy_between(driver, contexts[a], contexts[b])
        except RuntimeError as err:
            facts["error"] = str(err)
    return facts


def copy_between(driver: Driver, here: int, there: int) -> bool:
    """Bytes written here, copied there by `here` through its peer access, read back there."""
    size = ctypes.c_size_t(PEER_BYTES)
    addrs = []
    for context in (here, there):
        driver("cuCtxSetCurrent", ctypes.c_void_p(context))
        addrs.append(ctypes.c_uint64(driver.value("cuMemAlloc_v2", size, kind=ctypes.c_uint64)))
    driver("cuCtxSetCurrent", ctypes.c_void_p(here))
    driver("cuCtxEnablePeerAccess", ctypes.c_void_p(there), 0)
    driver("cuMemsetD8_v2", addrs[0], ctypes.c_ubyte(0x5A), size)
    driver("cuMemcpyDtoD_v2", addrs[1], addrs[0], size)
    driver("cuCtxSynchronize")
    data = ctypes.create_string_buffer(PEER_BYTES)
    driver("cuCtxSetCurrent", ctypes.c_void_p(there))
    driver("cuMemcpyDtoH_v2", data, addrs[1], size)
    return data.raw == b"\x5a" * PEER_BYTES


# -------------------------------------------------------------------- UCX, verbs


def ucx() -> dict[str, Any]:
    """Version and transports of the UCX that the HCA opens."""
    from ..hca.ucx import find_library, set_defaults

    set_defaults()
    # The HCA's very file: in the wheel, libucp.so is a copy of libucp.so.0, and a process that has
    # loaded both ends with a segmentation fault.
    place = find_library()
    try:
        ucp = ctypes.CDLL(place)
    except OSError as err:
        return {"missing": str(err)}
    ucp.ucp_get_version_string.restype = ctypes.c_char_p
    # The transports are in libuct, which libucp depends on: dlsym finds them through libucp.
    listed, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_uint()
    if code := ucp.uct_query_components(ctypes.byref(listed), ctypes.byref(count)):
        raise RuntimeError(f"uct_query_components: error {code}")
    names = []
    for i in range(count.value):
        # uct_component_attr (uct.h): field_mask (1: name, 2: md_resource_count), name[16], count
        attributes = ctypes.create_string_buffer(256)
        ctypes.c_uint64.from_buffer(attributes).value = 3
        if ucp.uct_component_query(ctypes.c_void_p(listed[i]), attributes):
            continue
        name = attributes.raw[8:24].split(b"\0")[0].decode()
        if ctypes.c_uint.from_buffer(attributes, 24).value:  # there are devices for it
            names.append(name)
    return {"version": ucp.ucp_get_version_string().decode(), "library": place,
            "transports": names, "open_hca": opens("ucx")}


def opens(name: str) -> str:
    """"" if this release can open the HCA here, else why not."""
    from ..errors import ExpertwireError
    from ..hca import open_hca

    try:
        open_hca(name).close()
    except (ExpertwireError, OSError) as err:
        return str(err)
    return ""


def verbs(device: str) -> dict[str, Any]:
    """Opens an RDMA device and registers memory with it, through pyverbs."""
    from importlib import import_module  # pyverbs comes with the system, not from PyPI

    context = import_module("pyverbs.device").Context(name=device)
    pd = import_module("pyverbs.pd").PD(context)
    mr = import_module("pyverbs.mr").MR(pd, 1 << 24, 1)  # 16 MiB: twice the usual limit
    mr.close()
    pd.close()
    context.close()
    return {"opened": device, "open_hca": opens(f"mlx5:{device}")}


PROBES = {"job": job, "gpu": gpu, "ucx": ucx, "verbs": verbs}


if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]](*sys.argv[2:])))
