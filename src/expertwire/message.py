"""What travels between a client and a server (docs/wire.md).

The byte layout is defined in device/message.cuh; this module spells it again for Python, and a
test compares every size and offset.
"""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass
from functools import cached_property

import torch

from ._native import declare
from .device_structs import BufferHead, ReplyHead
from .errors import ConfigError

REQUEST_MAGIC = 0x51525745  # b"EWRQ"
REPLY_MAGIC = 0x50525745  # b"EWRP"
WIRE_VERSION = 1
FLAG_BYTES = 16
FP8_BLOCK = 128  # elements per fp32 scale of an fp8 row

DATA_TYPES = {
    torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.float8_e4m3fn: 4,
}
DATA_TYPE_BYTES = {1: 4, 2: 2, 3: 2, 4: 1}
DTYPE_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ReplyMode(enum.IntEnum):
    """What a server sends back for a row."""

    SUM = 0  # one row per token: the weighted sum over this server's experts
    PER_EXPERT = 1  # one weighted row per (token, expert): the client fixes the order of the sum


class Reason(enum.IntEnum):
    """Why a server refused a message."""

    OK = 0
    MAGIC = 1
    VERSION = 2
    CHECKSUM = 3
    SEQ = 4
    LAYER = 5
    HIDDEN_SIZE = 6
    DATA_TYPE = 7
    SCALE = 8
    ROWS = 9
    EXPERTS_PER_ROW = 10
    NUM_EXPERTS = 11
    REPLY = 12
    BYTES = 13
    NOT_HELD = 14
    CLIENT = 15
    EXPERT_FAULT = 16


REASON_TEXT = {
    Reason.MAGIC: "the head does not begin with the request magic",
    Reason.VERSION: "the wire version is another one",
    Reason.CHECKSUM: "the head's checksum does not match its bytes",
    Reason.SEQ: "the sequence number does not match the flag or does not grow",
    Reason.LAYER: "the layer does not exist in this model",
    Reason.HIDDEN_SIZE: "the hidden size is not the model's",
    Reason.DATA_TYPE: "the data type is not the one this server computes in",
    Reason.SCALE: "scale type or block do not fit the data type",
    Reason.ROWS: "the number of rows is 0 or more than a slot holds",
    Reason.EXPERTS_PER_ROW: "experts per row is 0 or more than this server accepts",
    Reason.NUM_EXPERTS: "the number of experts is not the model's",
    Reason.REPLY: "the reply mode or type is not supported or does not fit the slot",
    Reason.BYTES: "section sizes do not add up",
    Reason.NOT_HELD: "an expert of the message is not held by this server",
    Reason.CLIENT: "the client id is not the one of this connection",
    Reason.EXPERT_FAULT: "the experts failed on this batch (see the server's log)",
}


def align16(num_bytes: int) -> int:
    return (num_bytes + 15) & ~15


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a model dtype name. Raises ConfigError for one that cannot travel."""
    if name not in DTYPE_NAMES:
        raise ConfigError(f"dtype {name!r} is not served; use one of {', '.join(DTYPE_NAMES)}")
    return DTYPE_NAMES[name]


@dataclass(frozen=True)
class RequestLayout:
    """Byte offsets of a request's sections, counted from the slot's first byte."""

    active_offset: int
    hidden_offset: int
    weights_offset: int
    scales_offset: int
    end: int

    @classmethod
    def of(
        cls, num_rows: int, experts_per_row: int, row_bytes: int, scales_per_row: int = 0
    ) -> RequestLayout:
        """Layout for num_rows rows of row_bytes each (message.cuh request_layout)."""
        ids = align16(num_rows * experts_per_row * 4)
        hidden = align16(num_rows * row_bytes)
        scales = align16(num_rows * scales_per_row * 4)
        active_offset = ctypes.sizeof(BufferHead)
        hidden_offset = active_offset + ids
        weights_offset = hidden_offset + hidden
        scales_offset = weights_offset + ids
        return cls(active_offset, hidden_offset, weights_offset, scales_offset,
                   scales_offset + scales)


@dataclass(frozen=True)
class SlotShape:
    """Sizes that both ends of a connection agree on when it is made."""

    num_slots: int
    max_rows: int
    experts_per_row: int
    hidden_size: int
    element_bytes: int  # of the model's dtype
    fp8: bool
    reply_mode: int
    reply_element_bytes: int

    def __post_init__(self) -> None:
        for name in ("num_slots", "max_rows", "experts_per_row", "hidden_size", "element_bytes",
                     "reply_element_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_rows * self.experts_per_row >= 2**31:
            raise ConfigError("max_rows * experts_per_row must stay below 2^31")

    @cached_property
    def request_slot_bytes(self) -> int:
        plain = RequestLayout.of(
            self.max_rows, self.experts_per_row, self.hidden_size * self.element_bytes
        ).end
        scales = -(-self.hidden_size // FP8_BLOCK)
        packed = RequestLayout.of(
            self.max_rows, self.experts_per_row, self.hidden_size, scales
        ).end
        return max(plain, packed if self.fp8 else 0) + FLAG_BYTES

    @cached_property
    def max_reply_rows(self) -> int:
        per_expert = self.reply_mode == ReplyMode.PER_EXPERT
        return self.max_rows * (self.experts_per_row if per_expert else 1)

    @cached_property
    def reply_slot_bytes(self) -> int:
        rows_bytes = align16(self.max_reply_rows * self.hidden_size * self.reply_element_bytes)
        return rows_bytes + ctypes.sizeof(ReplyHead) + FLAG_BYTES


def head_checksum(head: ctypes.Structure) -> int:
    """Checksum over all of a head but its last 8 bytes, as the device code computes it."""
    function = declare("ew_head_checksum", ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint32)
    return function(ctypes.addressof(head), ctypes.sizeof(head) - 8)
