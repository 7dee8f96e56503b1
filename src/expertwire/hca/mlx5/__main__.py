"""`python -m expertwire.hca.mlx5 DEVICE[:PORT]`: what the port says, then messages to itself.

The first thing to run on an adapter: two queue pairs of one port, connected with each other, and
puts by the device code on the CPU, through the real ring, register and completion queue. No GPU, no
second host. Prints what it does before it does it, so that the last line of a failure says where.
"""

from __future__ import annotations

import ctypes
import sys
from typing import cast

from ...control.connection import Endpoint
from ...device_structs import IbgdaOperation, IbgdaRunArgs, KernelStatus
from ...errors import ExpertwireError, HcaError
from ...launch import Launch
from ..interface import Hca
from .hca import Mlx5Hca, open_mlx5

# device/device_checks.cuh
PUT, ADD, QUIET = 1, 4, 6
SIZES = (1, 64, 4096, 65536, 1 << 20)


def describe(hca: Mlx5Hca) -> list[str]:
    """What was asked of the port and the firmware, a line each."""
    port, caps = hca.device.port, hca.device.caps
    layer = "Ethernet" if port.is_ethernet else f"InfiniBand, LID {port.lid:#x}"
    return [
        f"{hca.device.name} port {port.number}: {layer}, MTU {128 << port.mtu}, "
        f"P_Key index {port.pkey_index}",
        f"GID {port.gid}",
        f"send queues to {1 << min(caps.log_max_sq, caps.log_max_cq)} entries, messages to "
        f"2^{caps.log_max_msg} bytes, atomics {'yes' if caps.atomics else 'no'}, masked "
        f"{'yes' if caps.masked_atomics else 'no'}",
    ]


def run(end: Endpoint, *operations: dict) -> None:
    """Operations by the device code on one warp. Raises HcaError if they do not complete."""
    table = (IbgdaOperation * len(operations))(*[IbgdaOperation(**o) for o in operations])
    status = KernelStatus()
    args = IbgdaRunArgs(peer=end.peer_addr, operations=ctypes.addressof(table),
                        status=ctypes.addressof(status), num_operations=len(operations))
    Launch([("ibgda_run", args)]).run()
    if status.code:
        syndrome, idx = end.first_error()
        raise HcaError(f"device code ended with {status.code}, completion syndrome "
                       f"{syndrome:#04x} at entry {idx}", syndrome, idx)


def exchange(here: Endpoint, there: Endpoint, num_bytes: int, count: int) -> None:
    """One message: the payload, then a counter by masked fetch-and-add."""
    payload = bytes((i * 7 + count) & 0xFF for i in range(256)) * (num_bytes // 256 + 1)
    ctypes.memmove(here.send.addr, payload, num_bytes)
    # One at a time: the only completion entry would show what was flushed behind an error.
    run(here, dict(op=PUT, remote_addr=there.recv.addr + 64, local_addr=here.send.addr,
                   num_bytes=num_bytes), dict(op=QUIET))
    run(here, dict(op=ADD, remote_addr=there.recv.addr, value=1), dict(op=QUIET))
    if ctypes.string_at(there.recv.addr + 64, num_bytes) != payload[:num_bytes]:
        raise HcaError(f"{num_bytes} bytes completed and are not what was sent")
    seen = ctypes.c_uint64.from_address(there.recv.addr).value
    if seen != count:
        raise HcaError(f"the counter is {seen}, expected {count}")


def loop_back(hca: Mlx5Hca) -> list[str]:
    """Two connected queue pairs of the port, messages both ways. Returns what went well."""
    room = SIZES[-1] + 64
    first, second = (
        Endpoint(cast(Hca, hca), send_bytes=room, recv_bytes=room) for _ in range(2))
    done = []
    try:
        done.append(f"queue pairs {first.connection_handle().qpns[0]:#x} and "
                    f"{second.connection_handle().qpns[0]:#x}")
        for end, peer in ((first, second), (second, first)):
            end.connect(peer.connection_handle(), peer.memory_handle(), [], peer.wire_handle())
        done.append("connected: RTS")
        for count, num_bytes in enumerate(SIZES, 1):
            exchange(first, second, num_bytes, count)
            exchange(second, first, num_bytes, count)
            done.append(f"{num_bytes} bytes there and back")
    except ExpertwireError as err:
        raise HcaError(f"after: {'; '.join(done) or 'nothing'}: {err}") from err
    finally:
        first.close()
        second.close()
    return done


def main(place: str) -> int:
    """Exit code 0 if everything went well."""
    try:
        print(f"opening {place}", flush=True)
        with open_mlx5(f"mlx5:{place}") as hca:
            for line in describe(hca):
                print(line, flush=True)
            for line in loop_back(hca):
                print(line, flush=True)
    except ExpertwireError as err:
        print(f"{type(err).__name__}: {err}", file=sys.stderr)
        return 1
    print("all of it arrived")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
