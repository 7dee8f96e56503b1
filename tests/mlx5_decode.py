"""Reads firmware commands by rdma-core's layouts (tests/oracles/prm.json), not by our own."""

from __future__ import annotations

import json
from pathlib import Path

ORACLE = json.loads((Path(__file__).parent / "oracles/prm.json").read_text())
# opcode -> the class of rdma-core's tests that it is made of
CLASSES = {
    0x100: "QueryHcaCapIn", 0x200: "CreateMkeyIn", 0x400: "CreateCqIn", 0x500: "CreateQpIn",
    0x502: "ModifyQpIn", 0x503: "ModifyQpIn", 0x504: "ModifyQpIn", 0x50B: "QueryQpIn",
    0x507: "QueryQpIn", 0x50A: "QueryQpIn",  # 2ERR and 2RST: opcode and queue pair only
}
PARTS = {
    "sw_qpc": "SwQpc", "sw_cqc": "SwCqc", "sw_mkc": "SwMkc", "primary_address_path": "SwAds",
    "secondary_address_path": "SwAds",
}


def bits(raw: bytes, first: int, count: int) -> int:
    """`count` big-endian bits from bit `first` on."""
    word = int.from_bytes(raw, "big")
    return word >> (len(raw) * 8 - first - count) & (1 << count) - 1


def decode_struct(raw: bytes, name: str, first: int = 0) -> dict:
    """Fields that are not zero, nested structures as dicts. Reserved bits must be zero."""
    found: dict = {}
    for field, (at, count) in ORACLE["python"][name].items():
        if field in PARTS:
            if part := decode_struct(raw, PARTS[field], first + at):
                found[field] = part
        elif value := bits(raw, first + at, count):
            assert not field.startswith("reserved"), f"{name}.{field} is not zero: {value:#x}"
            found[field] = value
    return found


def decode(raw: bytes) -> dict:
    """A command's fields that are not zero; every bit of it belongs to a named field."""
    name = CLASSES[bits(raw, 0, 16)]
    fields = ORACLE["python"][name].values()
    assert len(raw) * 8 == max(at + count for at, count in fields), f"{name}: {len(raw)} bytes"
    return decode_struct(raw, name)


def encode_answer(name: str, first: int, num_bytes: int, **values: int) -> bytes:
    """An answer with a structure of mlx5_ifc.h at bit `first`."""
    word = 0
    for field, value in values.items():
        at, count = ORACLE["c"][name][field]
        assert value < 1 << count
        word |= value << (num_bytes * 8 - first - at - count)
    return word.to_bytes(num_bytes, "big")
