"""The firmware's commands that bring a queue pair up: their fields, bit by bit.

A command is a string of big-endian bits; a field is named, and has a first bit and a width. Layouts
are those of rdma-core (providers/mlx5/mlx5_ifc.h, tests/mlx5_prm_structs.py), checked against both
by tests/unit/mlx5/test_prm.py. Only fields that are used here are listed: every other bit is zero.
"""

from __future__ import annotations

from collections.abc import Mapping

Layout = Mapping[str, tuple[int, int]]  # name -> (first bit, bits)

# MLX5_CMD_OP_* of mlx5_ifc.h
QUERY_HCA_CAP, CREATE_MKEY, CREATE_CQ, CREATE_QP = 0x100, 0x200, 0x400, 0x500
RST2INIT_QP, INIT2RTR_QP, RTR2RTS_QP = 0x502, 0x503, 0x504
QP_2ERR, QP_2RST, QUERY_QP = 0x507, 0x50A, 0x50B
OPCODE_NAMES = {
    QUERY_HCA_CAP: "QUERY_HCA_CAP", CREATE_MKEY: "CREATE_MKEY", CREATE_CQ: "CREATE_CQ",
    CREATE_QP: "CREATE_QP", RST2INIT_QP: "RST2INIT_QP", INIT2RTR_QP: "INIT2RTR_QP",
    RTR2RTS_QP: "RTR2RTS_QP", QP_2ERR: "2ERR_QP", QP_2RST: "2RST_QP", QUERY_QP: "QUERY_QP",
}
# QUERY_HCA_CAP: which capabilities, as they are now (bit 0)
CAP_GENERAL, CAP_ATOMIC, CAP_ROCE = 0x00 << 1 | 1, 0x03 << 1 | 1, 0x04 << 1 | 1

ST_RC, PM_MIGRATED = 0, 3
# Of a queue pair without receive queue (Linux drivers/infiniband/hw/mlx5, MLX5_ZERO_LEN_RQ).
RQ_NONE = 3
TS_FREE_RUNNING, TS_DEFAULT = 0, 1
ATOMIC_UP_TO_8_BYTES = 3
ACCESS_MODE_MTT = 1
NO_QPN = 0xFFFFFF  # a memory key for every queue pair of its protection domain


def _at(first: int, fields: Layout, prefix: str = "") -> dict[str, tuple[int, int]]:
    return {prefix + name: (first + bit, bits) for name, (bit, bits) in fields.items()}


# An address path (mlx5_ifc_ads_bits)
ADS: Layout = {
    "pkey_index": (16, 16), "grh": (40, 1), "mlid": (41, 7), "rlid": (48, 16),
    "ack_timeout": (64, 5), "src_addr_index": (72, 8), "stat_rate": (84, 4),
    "hop_limit": (88, 8), "tclass": (100, 8), "flow_label": (108, 20), "rgid_rip": (128, 128),
    "dscp": (266, 6), "udp_sport": (272, 16), "eth_prio": (289, 3), "sl": (292, 4),
    "vhca_port_num": (296, 8), "rmac": (304, 48),
}
QPC: Layout = {
    "state": (0, 4), "st": (8, 8), "pm_state": (19, 2), "pd": (40, 24), "mtu": (64, 3),
    "log_msg_max": (67, 5), "log_rq_size": (73, 4), "log_sq_size": (81, 4), "ts_format": (88, 2),
    "uar_page": (104, 24), "user_index": (136, 24), "remote_qpn": (168, 24),
    "log_ack_req_freq": (896, 4), "log_sra_max": (904, 3), "retry_count": (909, 3),
    "rnr_retry": (912, 3), "next_send_psn": (968, 24), "cqn_snd": (1000, 24),
    "log_rra_max": (1160, 3), "atomic_mode": (1164, 4), "rre": (1168, 1), "rwe": (1169, 1),
    "rae": (1170, 1), "min_rnr_nak": (1187, 5), "next_rcv_psn": (1192, 24),
    "cqn_rcv": (1256, 24), "dbr_addr": (1280, 64), "rq_type": (1381, 3),
    "dbr_umem_valid": (1667, 1), "dbr_umem_id": (1824, 32),
    **_at(192, ADS, "path."),
}
CQC: Layout = {
    "dbr_umem_valid": (6, 1), "cqe_sz": (8, 3), "cc": (11, 1), "oi": (14, 1),
    "dbr_umem_id": (32, 32), "log_cq_size": (99, 5), "uar_page": (104, 24), "c_eqn": (184, 8),
}
MKC: Layout = {
    "relaxed_ordering_write": (13, 1), "a": (17, 1), "rw": (18, 1), "rr": (19, 1), "lw": (20, 1),
    "lr": (21, 1), "access_mode_1_0": (22, 2), "qpn": (32, 24), "mkey_7_0": (56, 8),
    "pd": (104, 24), "start_addr": (128, 64), "len": (192, 64), "relaxed_ordering_read": (473, 1),
}
_HEAD: Layout = {"opcode": (0, 16), "uid": (16, 16), "op_mod": (48, 16)}
_OUT: Layout = {"status": (0, 8), "syndrome": (32, 32)}
_MODIFY: Layout = {
    **_HEAD, "qpn": (72, 24), "opt_param_mask": (128, 32), **_at(192, QPC, "qpc."),
}
# Inputs by opcode: layout and bytes.
INPUTS: Mapping[int, tuple[Layout, int]] = {
    QUERY_HCA_CAP: (_HEAD, 16),
    CREATE_CQ: ({**_HEAD, **_at(128, CQC, "cqc."), "cq_umem_offset": (640, 64),
                 "cq_umem_id": (704, 32), "cq_umem_valid": (736, 1)}, 272),
    CREATE_QP: ({**_HEAD, "opt_param_mask": (128, 32), **_at(192, QPC, "qpc."),
                 "wq_umem_id": (2112, 32), "wq_umem_valid": (2144, 1)}, 272),
    CREATE_MKEY: ({**_HEAD, "mkey_umem_valid": (97, 1), **_at(128, MKC, "mkc."),
                   "translations_octword_actual_size": (768, 32), "mkey_umem_id": (800, 32),
                   "mkey_umem_offset": (832, 64)}, 272),
    RST2INIT_QP: (_MODIFY, 272), INIT2RTR_QP: (_MODIFY, 272), RTR2RTS_QP: (_MODIFY, 272),
    QP_2ERR: ({**_HEAD, "qpn": (72, 24)}, 16), QP_2RST: ({**_HEAD, "qpn": (72, 24)}, 16),
    QUERY_QP: ({**_HEAD, "qpn": (72, 24)}, 16),
}
CREATED: Layout = {**_OUT, "number": (72, 24)}  # cqn, qpn or mkey_index
CREATED_BYTES = MODIFIED_BYTES = 16
QUERY_QP_OUT: Layout = {**_OUT, **_at(192, QPC, "qpc.")}
QUERY_QP_OUT_BYTES = 272
QUERY_CAP_BYTES = 16 + 4096
GENERAL_CAP: Layout = {**_OUT, **_at(128, {
    "log_max_qp_sz": (136, 8), "log_max_cq_sz": (200, 8), "log_max_ra_req_qp": (330, 6),
    "log_max_ra_res_qp": (346, 6), "port_type": (438, 2), "num_ports": (440, 8),
    "log_max_msg": (451, 5), "cqe_version": (508, 4), "roce": (541, 1), "atomic": (542, 1),
    "rc": (575, 1), "sq_ts_format": (1088, 2),
})}
ATOMIC_CAP: Layout = {**_OUT, **_at(128, {
    "atomic_operations": (144, 16), "atomic_size_qp": (176, 16),
})}
ROCE_CAP: Layout = {**_OUT, **_at(128, {"qp_ts_format": (30, 2)})}


def put(raw: bytearray, layout: Layout, name: str, value: int) -> None:
    """Sets a field. Raises ValueError for a value that it does not hold, KeyError for no field."""
    first, bits = layout[name]
    if not 0 <= value < 1 << bits:
        raise ValueError(f"{name} has {bits} bits: {value:#x} does not fit")
    begin, end = first // 8, -(-(first + bits) // 8)
    shift = end * 8 - first - bits
    word = int.from_bytes(raw[begin:end], "big")
    word = word & ~(((1 << bits) - 1) << shift) | value << shift
    raw[begin:end] = word.to_bytes(end - begin, "big")


def get(raw: bytes, layout: Layout, name: str) -> int:
    """Reads a field."""
    first, bits = layout[name]
    begin, end = first // 8, -(-(first + bits) // 8)
    word = int.from_bytes(raw[begin:end], "big") >> end * 8 - first - bits
    return word & (1 << bits) - 1


def command(opcode: int, **fields: int | Mapping[str, int]) -> bytes:
    """The bytes of a command. A mapping is a part: qpc={"mtu": 3} is the field "qpc.mtu"."""
    layout, num_bytes = INPUTS[opcode]
    raw = bytearray(num_bytes)
    put(raw, layout, "opcode", opcode)
    for name, value in fields.items():
        parts = {name: value} if isinstance(value, int) else {
            f"{name}.{part}": each for part, each in value.items()}
        for each, number in parts.items():
            put(raw, layout, each, number)
    return bytes(raw)
