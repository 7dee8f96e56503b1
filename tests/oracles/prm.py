"""Where rdma-core says the fields of the firmware's commands are: two readings of its own.

    python -m tests.oracles.libmlx5 build FOLDER      (fetches the source of rdma-core)
    python -m tests.oracles.prm FOLDER/pyverbs-59.0/rdma-core    (writes prm.json)

`mlx5_ifc.h` is the layout that libmlx5 is compiled with, `mlx5_prm_structs.py` the one that
rdma-core's Python tests drive adapters with. They were written apart and are read here by name,
offset and width. Facts only; nothing of them is copied into this repository.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

GOLDEN = Path(__file__).with_name("prm.json")
Fields = dict[str, list[int]]  # name -> [first bit, bits]

C_STRUCTS = (
    "create_qp_in", "create_qp_out", "create_cq_out", "create_mkey_out",
    "rst2init_qp_in", "init2rtr_qp_in", "rtr2rts_qp_in", "query_hca_cap_in", "query_qp_in",
    "query_qp_out", "ads", "qpc", "mkc", "cmd_hca_cap", "atomic_caps", "roce_cap",
)
PY_CLASSES = (
    "CreateQpIn", "CreateQpOut", "CreateCqIn", "CreateCqOut", "CreateMkeyIn", "CreateMkeyOut",
    "ModifyQpIn", "QueryHcaCapIn", "QueryQpIn", "QueryQpOut", "SwAds", "SwQpc", "SwMkc", "SwCqc",
)
_C_FIELD = re.compile(
    r"(?:u8|struct mlx5_ifc_(?P<kind>\w+)_bits)\s+(?P<name>\w+)(?P<sizes>(?:\[\w+\])*);")
_PY_FIELD = re.compile(
    r"(?P<type>\w+)\('(?P<name>\w+)',\s*(?P<rest>(?:[^()]|\([^()]*\))*)\)")
_PY_BITS = {"ByteField": 8, "ShortField": 16, "IntField": 32, "LongField": 64, "MACField": 48}


def read_c(text: str, name: str) -> tuple[Fields, int]:
    """A struct's fields, and its size in bits. Names such as reserved_at_20 must be true."""
    body = re.search(rf"struct mlx5_ifc_{name}_bits {{\n(.*?)\n}};", text, re.S)
    assert body, f"no struct {name}"
    fields: Fields = {}
    at = 0
    for match in _C_FIELD.finditer(body[1]):
        sizes = [int(size, 0) for size in re.findall(r"\[(\w+)\]", match["sizes"])]
        bits = read_c(text, match["kind"])[1] if match["kind"] else 1
        for size in sizes:
            bits *= size
        told = re.fullmatch(r"reserved_at_([0-9a-f]+)", match["name"])
        if told and int(told[1], 16) != at:
            # A few names of the header have grown stale; a field between them must still fit.
            fields.setdefault("stale names", []).append(at)
        fields[match["name"]] = [at, bits]
        at += bits
    return fields, at


def read_python(text: str, name: str) -> tuple[Fields, int]:
    """The same of a class of scapy fields, without scapy."""
    body = re.search(rf"^class {name}\(.*?fields_desc = \[\n(.*?)\n    \]", text, re.S | re.M)
    assert body, f"no class {name}"
    fields: Fields = {}
    at = 0
    for match in _PY_FIELD.finditer(body[1]):
        kind, rest = match["type"], match["rest"]
        if kind == "BitField":
            bits = int(rest.split(",")[1], 0)
        elif kind == "StrFixedLenField":
            bits = 8 * int(re.search(r"length=(\d+)", rest)[1])  # ty: ignore[not-subscriptable]
        elif kind == "PacketField":
            bits = read_python(text, rest.split("(")[0].strip())[1]
        elif kind == "FieldListField" and "rgid_rip" in match["name"]:
            bits = 4 * 32
        elif kind in _PY_BITS:
            bits = _PY_BITS[kind]
        else:
            break  # an open list at the end
        fields[match["name"]] = [at, bits]
        at += bits
    return fields, at


def main(root: Path) -> None:
    c = (root / "providers/mlx5/mlx5_ifc.h").read_text()
    py = (root / "tests/mlx5_prm_structs.py").read_text()
    found = {
        "source": "rdma-core 59.0: providers/mlx5/mlx5_ifc.h, tests/mlx5_prm_structs.py",
        "command": "python -m tests.oracles.libmlx5 build FOLDER; "
                   "python -m tests.oracles.prm FOLDER/pyverbs-59.0/rdma-core",
        "c": {name: read_c(c, name)[0] for name in C_STRUCTS},
        "python": {name: read_python(py, name)[0] for name in PY_CLASSES},
    }
    text = json.dumps(found, indent=1)
    GOLDEN.write_text(re.sub(r"\[\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2]", text) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
