"""GPU memory for an adapter: the driver calls, and the key that is made; with neither here."""

from __future__ import annotations

import ctypes
import errno
import os

import pytest
from tests.mlx5_fake import DMABUFS, FakePort, connected

from expertwire.control.memory import ACCESS_LOCAL_WRITE, ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_WRITE
from expertwire.errors import HcaError
from expertwire.hca.mlx5 import errors as named
from expertwire.hca.mlx5 import gpu


class Code(int):
    name = "CUDA_ERROR_NOT_SUPPORTED"


class FakeDriver:
    """cuda.bindings.driver as far as gpu.py uses it; memory is the host's."""

    CUpointer_attribute = CUmemRangeHandleType = staticmethod(int)

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.fail: set[str] = set()
        self.memory: dict[int, object] = {}

    def __getattr__(self, name: str):
        if not name.startswith("cu"):
            raise AttributeError(name)
        def call(*args):
            self.calls.append((name, *args))
            if name in self.fail:
                return (Code(801),)
            return (Code(0), *getattr(self, f"do_{name}", lambda *_: ())(*args))

        return call

    def do_cuMemAlloc(self, num_bytes):
        raw = (ctypes.c_uint8 * (num_bytes + 4096))(*[7] * 16)
        addr = -(-ctypes.addressof(raw) // 4096) * 4096
        self.memory[addr] = raw
        return (addr,)

    def do_cuMemsetD8(self, addr, value, num_bytes):
        ctypes.memset(addr, value, num_bytes)
        return ()

    def do_cuMemGetHandleForAddressRange(self, addr, *_):
        fd = os.memfd_create("dmabuf")
        DMABUFS[fd] = addr
        return (fd,)

    def do_cuMemHostGetDevicePointer(self, addr, flags):
        return (addr + (1 << 40),)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(gpu, "_driver", lambda index: fake)
    return fake


def test_queue_pair_in_gpu_memory_is_registered_by_its_dmabuf(opened, driver):
    device, hca = opened(make_block=gpu.GpuBlock)
    qp = hca.create_qp(128)
    base, fd = qp.block.addr, qp.block.dmabuf
    facts = device.asked("UMEM")
    assert [f["addr"] for f in facts] == [0x10000, 0x30000, 0, 0x20000]  # offsets in the dmabuf
    assert all(f["dmabuf_fd"] == fd and f["comp_mask"] == 1 for f in facts)
    assert all(f["pgsz_bitmap"] == (1 << 64) - 4096 for f in facts)
    assert qp.info.sq_addr == base and qp.info.cq_addr == base + 0x10000
    assert qp.first_error() == (0, 0)  # and the CPU has not looked there
    flag = ("cuPointerSetAttribute", 1, gpu.SYNC_MEMOPS, base)
    assert flag in driver.calls
    qp.destroy()
    assert ("cuMemFree", base) in driver.calls
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_key_of_gpu_memory_begins_at_its_address_and_keeps_order(opened, driver):
    device, hca = opened()
    block = gpu.GpuBlock(5 << 20)
    mr = hca.register_gpu(block, ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_ATOMIC)
    (asked,) = device.command(0x200)
    assert asked["mkey_umem_valid"] == 1 and asked["mkey_umem_id"] in device.umems
    assert asked["sw_mkc"] == {
        "lr": 1, "lw": 1, "rw": 1, "a": 1, "access_mode_1_0": 1, "qpn": 0xFFFFFF, "pd": 0x77,
        "start_addr": block.addr, "len": 6 << 20}  # no relaxed ordering, no remote reads
    assert mr.lkey == 0x4322 << 8 == hca.region(mr.lkey).rkey
    before = len(device.open)
    hca.revoke(mr)
    assert len(device.open) == before - 2
    with pytest.raises(HcaError, match="not registered"):
        hca.revoke(mr)
    block.close()
    block.close()


def test_peermem_registers_gpu_memory_by_its_address(opened, driver):
    device, hca = opened(make_block=lambda n: gpu.GpuBlock(n, dmabuf=False))
    qp = hca.create_qp(64)
    assert not any(name == "cuMemGetHandleForAddressRange" for name, *_ in driver.calls)
    assert device.asked("UMEM")[0]["addr"] == qp.info.cq_addr
    assert device.asked("UMEM")[0]["comp_mask"] == 0


@pytest.mark.parametrize("call, words", [
    ("cuMemAlloc", "2097152 bytes of GPU 0.*full"),
    ("cuMemGetHandleForAddressRange", "open NVIDIA kernel modules.*nvidia-peermem"),
    ("cuPointerSetAttribute", "newer driver")])
def test_what_the_gpu_driver_refuses_is_named_and_freed(driver, call, words):
    driver.fail.add(call)
    with pytest.raises(named.GpuMemoryRefused, match=words):
        gpu.GpuBlock(100)
    freed = sum(name == "cuMemFree" for name, *_ in driver.calls)
    assert freed == (call != "cuMemAlloc")


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF])
def test_kernel_that_knows_no_dmabuf(opened, driver, code):
    device, hca = opened(make_block=gpu.GpuBlock)
    device.fail["UMEM"] = code
    with pytest.raises(named.GpuMemoryRefused, match=r"completion queue.*kernel \(5\.12"):
        hca.create_qp(64)
    with pytest.raises(named.GpuMemoryRefused, match="GPU memory"):
        hca.register_gpu(gpu.GpuBlock(100), ACCESS_LOCAL_WRITE)


def test_register_page_is_mapped_as_io_memory_and_seen_at_its_offset(opened, driver):
    _, hca = opened()
    qp = hca.create_qp(64)
    page = gpu.Mapped(qp.uar.reg_addr, 8, io=True)
    assert ("cuMemHostRegister", qp.uar.base_addr, 4096, 1 | 2 | 4) in driver.calls
    view = gpu.kernel_view(qp, page, None, None)
    assert view.uar_addr + 0x800 == qp.uar.reg_addr + (1 << 40)
    assert view.sq_addr == qp.info.sq_addr and view.qpn == qp.info.qpn
    page.close()
    page.close()
    assert driver.calls.count(("cuMemHostUnregister", qp.uar.base_addr)) == 1


def test_register_page_that_may_not_be_mapped(driver):
    driver.fail.add("cuMemHostRegister")
    with pytest.raises(named.GpuMemoryRefused, match=r"PeerMappingOverride=1.*EXPERTWIRE_DOORBELL"):
        gpu.Mapped(0x10800, 8, io=True)
    driver.fail = {"cuMemHostGetDevicePointer"}
    with pytest.raises(named.GpuMemoryRefused):
        gpu.Mapped(0x10800, 8, io=True)
    assert ("cuMemHostUnregister", 0x10000) in driver.calls


def test_doorbell_words_for_kernels(opened, driver):
    _, hca = opened(doorbell="proxy")
    _, there = opened(FakePort(lid=2))
    qp, _ = connected(hca, there)
    words = gpu.Mapped(*hca.doorbells.words, io=False)
    view = gpu.kernel_view(qp, None, words, hca.doorbells)
    assert view.proxy_addr == qp.info.proxy_addr + (1 << 40)
    assert view.uar_addr == qp.info.uar_addr
    words.close()
