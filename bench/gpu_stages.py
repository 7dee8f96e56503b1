"""Where a trip's time goes: every launch of the real path by itself, for several block counts.

    python bench/gpu_stages.py [--tokens 1,32,128,512] [--fp8]

Hidden 7168, top-8 of 256 experts at one server, which is on the last GPU; the kernels of
gpu_scale.py. After one trip each launch is repeated in a CUDA graph on what that trip left, so that
nothing is waited for; median microseconds, what a launch costs included. `take` is poll and group,
one block (the store that makes the message new again is subtracted); the others have as many blocks
as the number before their time says. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from expertwire.device_structs import ServerSlot, ServerTakeArgs
from expertwire.target import GpuTarget
from gpu_endpoints import Client, Server
from gpu_rig import TRIPS, WARPS, Pair, reach_each_other, synchronize

BLOCKS = (1, 4, 16, 64, 128)


def launch_us(run: Callable[[], Any], device: int) -> float:
    """Median microseconds of what `run` enqueues, in a graph of many."""
    times = Pair([run] * TRIPS, None, devices=(device, device)).measure(10)
    return statistics.median(times)


def by_blocks(gpu: GpuTarget, name: str, args: Any, more: int = 0) -> dict[int, float]:
    found = {}
    for blocks in BLOCKS:
        with torch.cuda.device(gpu.device):
            launch = gpu.prepare([(name, args)], grid=blocks + more, warps=WARPS)
        found[blocks] = round(launch_us(launch.run, gpu.device.index), 2)
    return found


def measure(num_tokens: int, fp8: bool) -> dict[str, Any]:
    last = torch.cuda.device_count() - 1
    here, there = GpuTarget(0), GpuTarget(last)
    client = Client(here, [there], num_tokens, fp8=fp8)
    server = Server(there, 0, [client])
    with torch.cuda.device(0):
        client.launch.run()
        torch.cuda.current_stream().synchronize()
    server.close()
    synchronize([0, last])
    client.check()
    # First of all: the message that it leaves is what the others work on.
    send = by_blocks(here, "client_send_direct", client.step.send_args, 1)
    slots, at = server._memory[0].tensor, ServerSlot.last_seq.offset

    def again() -> None:
        slots[at : at + 8].zero_()

    with torch.cuda.device(last):
        take = there.prepare(
            [("server_take", ServerTakeArgs(poll=server._poll, gather=server._gather))], warps=32)
        before = launch_us(again, last)
        both = launch_us(lambda: (again(), take.run()), last)
    return {
        "send": send, "take": round(both - before, 2),
        "gather": by_blocks(there, "server_gather_rows", server._gather),
        "reply": by_blocks(there, "server_reply_in_place", server._reply),
        "combine": by_blocks(here, "client_combine", client.step.combine),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", default="1,32,128,512", help="numbers, with commas")
    parser.add_argument("--fp8", action="store_true", help="rows as e4m3 with scales")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_stages: there is no GPU")
    started = time.monotonic()
    reach_each_other([0, torch.cuda.device_count() - 1])
    facts: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "fp8": options.fp8,
                             "gpus": torch.cuda.device_count(), "tokens": {}}
    for num_tokens in map(int, options.tokens.split(",")):
        found = facts["tokens"][num_tokens] = measure(num_tokens, options.fp8)
        for name, us in found.items():
            print(f"{num_tokens:>4} tokens, {name}: {us}", flush=True)
    facts["seconds"] = round(time.monotonic() - started, 1)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
