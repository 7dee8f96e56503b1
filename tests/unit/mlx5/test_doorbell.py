"""The thread that rings for kernels which cannot reach a register (native/doorbell.cpp)."""

from __future__ import annotations

import ctypes
import itertools
import time

import pytest

from expertwire.errors import HcaError
from expertwire.hca.mlx5.doorbell import Doorbells
from expertwire.hca.wqe import doorbell_register


@pytest.fixture
def bells():
    bells = Doorbells()
    yield bells
    bells.close()


def until(condition) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "the thread did not get there"
        time.sleep(0.0002)


def test_indices_reach_their_registers_in_the_adapters_form(bells):
    registers = (ctypes.c_uint64 * 3)()
    words = [bells.add() for _ in registers]
    for i, word in enumerate(words):
        bells.serve(word, ctypes.addressof(registers) + 8 * i, 0xABC00 + i)
    for index in (1, 0xFFFF, 0x10000, 0x1_0000_0005):
        for i, word in enumerate(words):
            ctypes.c_uint64.from_address(word).value = index + i
            expected = doorbell_register(index + i, 0xABC00 + i)
            until(lambda i=i, expected=expected: bytes(registers)[8 * i : 8 * i + 8] == expected)
    assert bells.num_rung == 12


def test_nothing_is_rung_before_it_is_served_and_after_it_is_removed(bells):
    register = ctypes.c_uint64()
    word = bells.add()
    ctypes.c_uint64.from_address(word).value = 3
    time.sleep(0.01)
    assert register.value == 0
    bells.serve(word, ctypes.addressof(register), 7)
    until(lambda: register.value)
    bells.remove(word)
    register.value = 0
    ctypes.c_uint64.from_address(word).value = 4
    time.sleep(0.01)
    assert register.value == 0
    assert bells.add() == word  # its place is free again, and starts from 0
    assert ctypes.c_uint64.from_address(word).value == 0


def test_after_a_long_rest_it_still_rings(bells):
    register = ctypes.c_uint64()
    word = bells.add()
    bells.serve(word, ctypes.addressof(register), 7)
    time.sleep(0.05)
    ctypes.c_uint64.from_address(word).value = 1
    until(lambda: register.value)


def test_words_are_one_range_with_a_cache_line_each(bells):
    begin, num_bytes = bells.words
    words = [bells.add() for _ in range(4)]
    assert words[0] == begin and num_bytes == 1024 * 64
    assert {b - a for a, b in itertools.pairwise(words)} == {64}


def test_too_many_and_unknown_words_are_refused(bells):
    for _ in range(1024):
        bells.add()
    with pytest.raises(HcaError, match="more than 1024"):
        bells.add()
    with pytest.raises(HcaError, match="no doorbell word at 0x10"):
        bells.serve(0x10, 0x20, 1)
