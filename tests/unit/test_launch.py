"""The CPU target: structure sizes, launch checks, kernels by name."""

from __future__ import annotations

import ctypes

import pytest

from expertwire import device_structs, launch
from expertwire.client import trip
from expertwire.device_structs import ClientRouteArgs, IbgdaRunArgs
from expertwire.errors import ConfigError, ExpertwireError
from expertwire.launch import Launch, find_kernel, struct_bytes
from expertwire.server import batch

STRUCTS = [
    "KernelStatus", "IbgdaKey", "IbgdaQp", "IbgdaPeer", "BufferHead", "ReplyHead", "ClientServer",
    "RouteTables", "MessageShape", "ServerSlot", "ServerMessage", "ServerModel", "ServerTakeArgs",
    "HcaKey", "HcaQueue",
]


@pytest.mark.parametrize("name", STRUCTS)
def test_python_and_device_agree_on_sizes(name):
    assert struct_bytes(name) == ctypes.sizeof(getattr(device_structs, name)) > 0


@pytest.mark.parametrize(("name", "spelled"), [
    ("ew_step", launch.Step), ("ew_flight", trip._NativeFlight), ("ew_batch", trip._NativeBatch),
    ("ew_server", batch._NativeServer),
])
def test_python_and_native_agree_on_sizes(name, spelled):
    assert struct_bytes(name) == ctypes.sizeof(spelled) > 0


def test_unknown_kernel_is_named():
    with pytest.raises(ConfigError, match="no_such_kernel"):
        find_kernel("no_such_kernel")


def test_wrong_arguments_are_refused():
    with pytest.raises(ExpertwireError, match=r"takes .* bytes of arguments"):
        Launch([("client_route", IbgdaRunArgs())]).run()


@pytest.mark.parametrize(
    ("warps", "warp_size", "grid"), [(1, 33, 1), (0, 4, 1), (1, 4, 0), (128, 32, 1)]
)
def test_bad_geometry_is_refused(warps, warp_size, grid):
    launch = Launch(
        [("client_route", ClientRouteArgs())], warps=warps, warp_size=warp_size, grid=grid
    )
    with pytest.raises(ExpertwireError, match=r"geometry|lanes"):
        launch.run()
