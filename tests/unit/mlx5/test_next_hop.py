"""The address handle that libibverbs is asked for, and where libmlx5 shows the next hop."""

from __future__ import annotations

import ctypes
import errno
from types import SimpleNamespace

import pytest

from expertwire.hca.mlx5.errors import LinkMismatch
from expertwire.hca.mlx5.next_hop import (
    AH_PLACE,
    AhAttr,
    DvObj,
    GlobalRoute,
    Path,
    attributes,
    next_hop_mac,
)

PATH = Path(bytes(range(16)), sgid_index=3, port=2, hop_limit=64, traffic_class=106,
            flow_label=0x54321, sl=4)


def test_structures_are_laid_out_as_in_verbs_h():
    """offsetof by a C compiler with rdma-core 59's verbs.h and mlx5dv.h, x86-64."""
    assert ctypes.sizeof(AhAttr) == 32
    assert {name: getattr(GlobalRoute, name).offset for name, _ in GlobalRoute._fields_} == {
        "dgid": 0, "flow_label": 16, "sgid_index": 20, "hop_limit": 21, "traffic_class": 22}
    assert {name: getattr(AhAttr, name).offset for name, _ in AhAttr._fields_} == {
        "grh": 0, "dlid": 24, "sl": 26, "src_path_bits": 27, "static_rate": 28, "is_global": 29,
        "port_num": 30}
    assert ctypes.sizeof(ctypes.c_void_p) * 2 * AH_PLACE == 80  # mlx5dv_obj.ah
    assert ctypes.sizeof(DvObj) == 112


def test_attributes_are_the_paths_and_everything_else_is_zero():
    raw = bytes(attributes(PATH))
    assert raw[:16] == PATH.dgid
    assert raw[16:20] == (0x54321).to_bytes(4, "little")
    assert raw[20:] == bytes([3, 64, 106, 0, 0, 0, 4, 0, 0, 1, 2, 0])


class Call:
    def __init__(self, function):
        self.function = function

    def __call__(self, *args):
        return self.function(*args)


def libraries(*, handle: int = 0xA4, code: int = 0):
    asked = []
    vector = ctypes.create_string_buffer(bytes(20) + bytes.fromhex("0c42a1000102") + bytes(22))

    def create(pd, attr):
        asked.append(("create", pd, ctypes.string_at(attr, 32)))
        if not handle:
            ctypes.set_errno(errno.EHOSTUNREACH)
        return handle

    def init(obj, kind):
        pair = (ctypes.c_uint64 * 2).from_address(obj + 80)
        asked.append(("init", pair[0], kind))
        ctypes.c_uint64.from_address(pair[1]).value = ctypes.addressof(vector)
        return code

    verbs = SimpleNamespace(ibv_create_ah=Call(create),
                            ibv_destroy_ah=Call(lambda ah: asked.append(("destroy", ah))))
    return asked, verbs, SimpleNamespace(mlx5dv_init_obj=Call(init))


def test_mac_is_read_from_the_address_vector_and_the_handle_given_back():
    asked, verbs, mlx5 = libraries()
    assert next_hop_mac(0xAD0, PATH, verbs, mlx5).hex(":") == "0c:42:a1:00:01:02"
    assert asked == [("create", 0xAD0, bytes(attributes(PATH))), ("init", 0xA4, 1 << 5),
                     ("destroy", 0xA4)]


def test_no_way_to_the_peer_is_told_with_what_to_try():
    asked, verbs, mlx5 = libraries(handle=0)
    with pytest.raises(LinkMismatch, match=r"GID index 3: .*EHOSTUNREACH.*ping"):
        next_hop_mac(0xAD0, PATH, verbs, mlx5)
    assert len(asked) == 1


def test_handle_that_libmlx5_does_not_show_is_given_back_too():
    asked, verbs, mlx5 = libraries(code=errno.EOPNOTSUPP)
    with pytest.raises(LinkMismatch, match="does not show"):
        next_hop_mac(0xAD0, PATH, verbs, mlx5)
    assert asked[-1] == ("destroy", 0xA4)
