"""NCCL beside ours: one process a GPU, operations in CUDA graphs, timed by the first process.

    python bench/gpu_nccl.py [--rows 1,32,128] [--row-bytes 14336]

`send_receive` and `all_to_all` start the processes, wait for them and return medians in
microseconds. The last line is JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

TRIPS, REPLAYS = 20, 30
SECONDS = 120  # for all processes of one call

Matrix = Sequence[Sequence[int]]  # rows from each rank to each rank


def send_receive(rows: Sequence[int], row_bytes: int) -> list[float]:
    """Microseconds of a trip from rank 0 to rank 1 and back, for each number of rows."""
    return _run({"op": "send_receive", "world": 2, "row_bytes": row_bytes, "cases": list(rows)})


def all_to_all(matrices: Sequence[Matrix], row_bytes: int) -> list[float]:
    """Microseconds of an all-to-all with these row counts and one back, for each matrix."""
    world = len(matrices[0])
    return _run({"op": "all_to_all", "world": world, "row_bytes": row_bytes,
                 "cases": [[list(line) for line in matrix] for matrix in matrices]})


def _run(task: dict[str, Any]) -> list[float]:
    env = {**os.environ, "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    with tempfile.TemporaryDirectory() as folder:
        task = {**task, "init": f"file://{folder}/store"}
        processes = [
            subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), "--rank", str(rank), "--task",
                 json.dumps(task)], env=env, stdout=subprocess.PIPE, text=True,
            ) for rank in range(task["world"])
        ]
        try:
            texts = [process.communicate(timeout=SECONDS)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    codes = [process.returncode for process in processes]
    if any(codes):
        raise SystemExit(f"gpu_nccl: the processes ended with {codes}")
    return json.loads(texts[0].splitlines()[-1])


def _work(rank: int, task: dict[str, Any]) -> list[float]:
    """One process."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=task["init"], rank=rank, world_size=task["world"], device_id=device,
        timeout=datetime.timedelta(seconds=60),
    )
    results = []
    for case in task["cases"]:
        if task["op"] == "send_receive":
            there = torch.randn(case * task["row_bytes"] // 4, device=device)
            back = torch.empty_like(there)

            def trip(there=there, back=back) -> None:
                for kind, tensor in ((dist.send, there), (dist.recv, back)) if rank == 0 else (
                        (dist.recv, back), (dist.send, back)):
                    kind(tensor, 1 - rank)

            check = (there, back) if rank == 0 else None
        else:
            out, into = case[rank], [line[rank] for line in case]
            width = task["row_bytes"] // 4
            there = torch.randn(sum(out), width, device=device)
            middle = torch.empty(sum(into), width, device=device)
            back = torch.empty_like(there)

            def trip(there=there, middle=middle, back=back, out=out, into=into) -> None:
                dist.all_to_all_single(middle, there, into, out)
                dist.all_to_all_single(back, middle, out, into)

            check = there, back
        results.append(_timed(trip))
        if check is not None and not torch.equal(*check):
            raise SystemExit(f"rank {rank}: other rows came back")
    dist.barrier()
    dist.destroy_process_group()
    return results


def _timed(trip: Any) -> float:
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            trip()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(TRIPS):
            trip()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    with torch.cuda.stream(stream):
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
    torch.cuda.synchronize()
    times = [1000 * a.elapsed_time(b) / TRIPS for a, b in pairwise(events)]
    return round(statistics.median(times[3:]), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", default="1,32,128", help="numbers of rows, with commas")
    parser.add_argument("--row-bytes", type=int, default=14336)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(_work(options.rank, json.loads(options.task))))
        return
    rows = [int(text) for text in options.rows.split(",")]
    times = send_receive(rows, options.row_bytes)
    print(json.dumps({"send_receive_us": dict(zip(rows, times, strict=True))}))


if __name__ == "__main__":
    main()
