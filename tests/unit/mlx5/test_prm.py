"""Our table of firmware fields against rdma-core's two, and commands read back by the latter."""

from __future__ import annotations

import pytest
from tests.mlx5_decode import ORACLE, decode

from expertwire.hca.mlx5 import prm

C, PY = ORACLE["c"], ORACLE["python"]
# our layout, the structure of mlx5_ifc.h, the class of rdma-core's tests; and names of theirs
LAYOUTS = [
    (prm.ADS, "ads", "SwAds", {}),
    (prm.QPC, "qpc", "SwQpc", {}),
    (prm.MKC, "mkc", "SwMkc", {}),
    (prm.CQC, None, "SwCqc", {}),
    (prm.INPUTS[prm.CREATE_QP][0], "create_qp_in", "CreateQpIn", {}),
    (prm.INPUTS[prm.CREATE_CQ][0], None, "CreateCqIn",
     {"cq_umem_offset": "e_mtt_pointer_or_cq_umem_offset"}),
    (prm.INPUTS[prm.CREATE_MKEY][0], None, "CreateMkeyIn", {}),
    (prm.INPUTS[prm.RST2INIT_QP][0], "rst2init_qp_in", "ModifyQpIn", {}),
    (prm.INPUTS[prm.INIT2RTR_QP][0], "init2rtr_qp_in", "ModifyQpIn", {}),
    (prm.INPUTS[prm.RTR2RTS_QP][0], "rtr2rts_qp_in", "ModifyQpIn", {}),
    (prm.INPUTS[prm.QUERY_QP][0], "query_qp_in", "QueryQpIn", {}),
    (prm.INPUTS[prm.QUERY_HCA_CAP][0], None, "QueryHcaCapIn", {}),
    (prm.QUERY_QP_OUT, "query_qp_out", "QueryQpOut", {}),
]
PARTS = {"qpc": ("qpc", "sw_qpc", "SwQpc"), "cqc": (None, "sw_cqc", "SwCqc"),
         "mkc": ("mkc", "sw_mkc", "SwMkc"),
         "path": ("ads", "primary_address_path", "SwAds")}
NO_UID_IN_C = {"query_qp_in"}  # the header calls it reserved


def expected(name: str, struct: str | None, cls: str, renamed: dict) -> list[list[int]]:
    """Where rdma-core has a field of ours: one place per reading that knows it."""
    part, _, rest = name.partition(".")
    found = []
    if rest:
        c_part, py_name, py_part = PARTS[part]
        inner = expected(rest, c_part, py_part, renamed)
        outers = [PY[cls][py_name]]
        if struct and c_part:
            outers.append(C[struct]["primary_address_path" if part == "path" else part])
        for outer in outers:
            found += [[outer[0] + at, bits] for at, bits in inner]
        return found
    if renamed.get(name, name) in PY[cls]:
        found.append(PY[cls][renamed.get(name, name)])
    if struct and name in C[struct]:
        found.append(C[struct][name])
    if struct and name == "rmac":
        high, low = C[struct]["rmac_47_32"], C[struct]["rmac_31_0"]
        assert high[0] + high[1] == low[0]
        found.append([high[0], high[1] + low[1]])
    return found


@pytest.mark.parametrize("layout, struct, cls, renamed", LAYOUTS, ids=[x[2] for x in LAYOUTS])
def test_every_field_is_where_rdma_core_has_it(layout, struct, cls, renamed):
    for name, place in layout.items():
        places = expected(name, struct, cls, renamed)
        assert places, f"rdma-core has no {name}"
        assert all(list(place) == theirs for theirs in places), f"{name}: {place}, {places}"


@pytest.mark.parametrize("layout, struct", [
    (prm.GENERAL_CAP, "cmd_hca_cap"), (prm.ATOMIC_CAP, "atomic_caps"), (prm.ROCE_CAP, "roce_cap")])
def test_capabilities_are_where_the_header_has_them(layout, struct):
    for name, (at, bits) in layout.items():
        if name not in ("status", "syndrome"):
            assert C[struct][name] == [at - 128, bits], name


def test_commands_are_as_long_as_rdma_cores():
    classes = {prm.CREATE_CQ: "CreateCqIn", prm.CREATE_QP: "CreateQpIn",
               prm.CREATE_MKEY: "CreateMkeyIn", prm.RST2INIT_QP: "ModifyQpIn",
               prm.QUERY_HCA_CAP: "QueryHcaCapIn", prm.QUERY_QP: "QueryQpIn"}
    for opcode, name in classes.items():
        assert prm.INPUTS[opcode][1] * 8 == max(at + bits for at, bits in PY[name].values()), name


def test_walking_ones_every_field_and_no_other_bit():
    for opcode, (layout, num_bytes) in prm.INPUTS.items():
        for name, (first, bits) in layout.items():
            if name == "opcode":
                continue
            raw = bytearray(num_bytes)
            prm.put(raw, layout, name, (1 << bits) - 1)
            assert int.from_bytes(raw, "big") == ((1 << bits) - 1) << num_bytes * 8 - first - bits
            assert prm.get(raw, layout, name) == (1 << bits) - 1, (opcode, name)
            prm.put(raw, layout, name, 0)
            assert not any(raw)


def test_neighbours_are_left_alone():
    raw = bytearray(prm.command(prm.CREATE_QP, qpc={"mtu": 5, "log_msg_max": 30, "pd": 0xABCDEF}))
    prm.put(raw, prm.INPUTS[prm.CREATE_QP][0], "qpc.log_msg_max", 1)
    assert decode(bytes(raw)) == {
        "opcode": 0x500, "sw_qpc": {"mtu": 5, "log_msg_max": 1, "pd": 0xABCDEF}}


def test_a_value_that_does_not_fit_and_a_field_that_is_none_are_refused():
    with pytest.raises(ValueError, match="mtu has 3 bits"):
        prm.command(prm.CREATE_QP, qpc={"mtu": 8})
    with pytest.raises(ValueError, match="log_msg_max"):
        prm.command(prm.CREATE_QP, qpc={"log_msg_max": -1})
    with pytest.raises(KeyError):
        prm.command(prm.CREATE_QP, qpc={"mtus": 1})
