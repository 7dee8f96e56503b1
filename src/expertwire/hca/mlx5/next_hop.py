"""The Ethernet address that packets to a GID leave for: the kernel resolves it, libmlx5 tells it.

pyverbs makes address handles and does not show what is in them, so this asks the same two
libraries for one (verbs.h ibv_create_ah, mlx5dv.h mlx5dv_init_obj with MLX5DV_OBJ_AH).
"""

from __future__ import annotations

import ctypes
import errno
import os
from ctypes import c_int, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

from .errors import LinkMismatch

OBJ_AH, NUM_OBJECTS, AH_PLACE = 1 << 5, 7, 5
RMAC_OFFSET = 20  # in mlx5_wqe_av: 16 bytes of base, 4 reserved ones of the GRH part


class GlobalRoute(ctypes.Structure):
    """ibv_global_route"""

    _fields_ = (("dgid", c_uint8 * 16), ("flow_label", c_uint32), ("sgid_index", c_uint8),
                ("hop_limit", c_uint8), ("traffic_class", c_uint8))


class AhAttr(ctypes.Structure):
    """ibv_ah_attr"""

    _fields_ = (("grh", GlobalRoute), ("dlid", c_uint16), ("sl", c_uint8),
                ("src_path_bits", c_uint8), ("static_rate", c_uint8), ("is_global", c_uint8),
                ("port_num", c_uint8))


class DvAh(ctypes.Structure):
    """mlx5dv_ah"""

    _fields_ = (("av", c_void_p), ("comp_mask", c_uint64))


class DvObj(ctypes.Structure):
    """mlx5dv_obj: pairs of pointers, the fifth (counted from 0) for address handles"""

    _fields_ = (("pairs", (c_void_p * 2) * NUM_OBJECTS),)


@dataclass(frozen=True)
class Path:
    """Where to: all that an address handle of a RoCE port takes."""

    dgid: bytes
    sgid_index: int
    port: int
    hop_limit: int
    traffic_class: int
    flow_label: int
    sl: int


def attributes(path: Path) -> AhAttr:
    """The address handle's attributes; what is not named is zero."""
    attr = AhAttr()
    attr.grh.dgid[:] = list(path.dgid)
    attr.grh.flow_label, attr.grh.sgid_index = path.flow_label, path.sgid_index
    attr.grh.hop_limit, attr.grh.traffic_class = path.hop_limit, path.traffic_class
    attr.sl, attr.is_global, attr.port_num = path.sl, 1, path.port
    return attr


def next_hop_mac(pd: int, path: Path, verbs: Any = None, mlx5: Any = None) -> bytes:
    """Six bytes. pd: address of the ibv_pd. Raises LinkMismatch if there is no way to the GID."""
    verbs = verbs or ctypes.CDLL("libibverbs.so.1", use_errno=True)
    mlx5 = mlx5 or ctypes.CDLL("libmlx5.so.1", use_errno=True)
    verbs.ibv_create_ah.restype = c_void_p
    verbs.ibv_create_ah.argtypes = (c_void_p, c_void_p)
    verbs.ibv_destroy_ah.argtypes = (c_void_p,)
    mlx5.mlx5dv_init_obj.restype = c_int
    mlx5.mlx5dv_init_obj.argtypes = (c_void_p, c_uint64)
    attr = attributes(path)
    handle = verbs.ibv_create_ah(pd, ctypes.addressof(attr))
    if not handle:
        code = ctypes.get_errno()
        raise LinkMismatch(
            f"no way to {path.dgid.hex(':', 2)} from GID index {path.sgid_index}: "
            f"{os.strerror(code)} ({errno.errorcode.get(code, code)}). Does `ping` reach that host "
            "from this port's interface? If not: routes, VLAN, or another gid_index"
        )
    try:
        out, obj = DvAh(), DvObj()
        obj.pairs[AH_PLACE][0], obj.pairs[AH_PLACE][1] = handle, ctypes.addressof(out)
        code = mlx5.mlx5dv_init_obj(ctypes.addressof(obj), OBJ_AH)
        if code or not out.av:
            raise LinkMismatch(f"libmlx5 does not show an address handle: {os.strerror(code)}")
        return ctypes.string_at(out.av + RMAC_OFFSET, 6)
    finally:
        verbs.ibv_destroy_ah(handle)
