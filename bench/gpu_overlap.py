"""Double batching: does attention work hide the trip to the experts?

    python bench/gpu_overlap.py [--gpus 2] [--rows 32,128] [--replays 20] [sizes as gpu_moe.py]

Two micro-batches of T rows each pass through all layers. With two GPUs the experts are in another
process on the second one (the server of gpu_remote.py); with one, behind a server on a stream of
its own. Between its layers each micro-batch has other work, as long as one trip takes:

    idle       one multiprocessor is held and no memory is read
    attention  one query a row over a key-value cache, in bf16: on one GPU it competes with the
               experts for memory, so that less can be won

    serial     work and trip of one micro-batch, then of the other
    overlapped `dispatch` of one, work of the other, `combine` of the first, and so on
    ideal      the longer of work and trip all the time, and once the shorter
    hidden     share of what could be hidden (the shorter of the two, always) that was

All are replays of CUDA graphs of all layers, median microseconds per layer of both micro-batches;
the results of serial and overlapped must be the same bits. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch

import gpu_remote
from expertwire.cuda.experts import GpuExperts
from expertwire.cuda.layers import GpuLayers
from expertwire.cuda.local import LocalExperts
from expertwire.cuda.remote import RemoteExperts
from gpu_moe import Inputs, draw, graph_us, make_model

HEAD_SIZE = 128
FIRST_LENGTH, FIRST_CYCLES = 512, 200_000  # of the work that is measured to find the right length
Work = Callable[[torch.Tensor], torch.Tensor]


def idle(us: float, options: argparse.Namespace) -> Work:
    """Work of about `us` microseconds that leaves the GPU to others."""

    def wait(hidden: torch.Tensor, cycles: int) -> torch.Tensor:
        torch.cuda._sleep(cycles)
        return hidden

    hidden = torch.zeros(1, device="cuda")
    took, _ = graph_us(lambda: wait(hidden, FIRST_CYCLES), options.replays)
    cycles = round(FIRST_CYCLES * us / took)
    return lambda hidden: wait(hidden, cycles)


def attention(us: float, num_rows: int, options: argparse.Namespace) -> Work:
    """Attention of one query a row that takes about `us` microseconds."""
    num_heads = options.hidden // HEAD_SIZE

    def make(length: int) -> Work:
        shape = num_rows, num_heads, length, HEAD_SIZE
        keys, values = torch.randn((2, *shape), dtype=torch.bfloat16, device="cuda").unbind()

        def attend(hidden: torch.Tensor) -> torch.Tensor:
            queries = hidden.view(num_rows, num_heads, 1, HEAD_SIZE)
            seen = torch.nn.functional.scaled_dot_product_attention(queries, keys, values)
            return hidden + seen.reshape(hidden.shape)

        return attend

    hidden = torch.randn(num_rows, options.hidden, device="cuda").to(torch.bfloat16)
    first = make(FIRST_LENGTH)
    took, _ = graph_us(lambda: first(hidden), options.replays)
    return make(max(64, round(FIRST_LENGTH * us / took / 64) * 64))


@contextlib.contextmanager
def experts_of(options: argparse.Namespace, num_rows: int) -> Iterator[GpuLayers]:
    if options.gpus == 1:
        experts = GpuExperts.from_model(make_model(options))
        with LocalExperts(experts, options.top_k, max_rows=num_rows, own_stream=True) as local:
            yield local
        return
    with gpu_remote.server_process(options) as registry, RemoteExperts(
            registry, token=gpu_remote.TOKEN, device=0, connect_timeout=60.0,
            max_rows=num_rows) as remote:
        yield remote


def serial(local: GpuLayers, work: Work, batches: list[list[Inputs]]) -> list[torch.Tensor]:
    """batches: for each micro-batch, its inputs for each layer; the first layer's hidden counts."""
    results = []
    hiddens = [layers[0][0] for layers in batches]
    for layer in range(len(batches[0])):
        results = []
        for hidden, layers in zip(hiddens, batches, strict=True):
            results.append(local.moe(layer, work(hidden), *layers[layer][1:]))
        hiddens = results
    return results


def overlapped(local: GpuLayers, work: Work, batches: list[list[Inputs]]) -> list[torch.Tensor]:
    """The same with one micro-batch's trip during the other's work."""
    first, second = batches
    handle_a = local.dispatch(0, work(first[0][0]), *first[0][1:])
    b = second[0][0]
    for layer in range(len(first)):
        handle_b = local.dispatch(layer, work(b), *second[layer][1:])
        a = handle_a.combine()
        if layer + 1 < len(first):
            handle_a = local.dispatch(layer + 1, work(a), *first[layer + 1][1:])
        b = handle_b.combine()
    return [a, b]


def compare(
    local: GpuLayers, work: Work, trip: float, num_rows: int, options: argparse.Namespace
) -> dict[str, float]:
    batches = [
        [draw(num_rows, options, 10 * which + layer) for layer in range(options.layers)]
        for which in range(2)
    ]
    hidden = batches[0][0][0]
    work_us, _ = graph_us(lambda: work(hidden), options.replays)
    want = serial(local, work, batches)
    for got, expected in zip(overlapped(local, work, batches), want, strict=True):
        if not (torch.equal(got, expected) and got.isfinite().all()):
            sys.exit("gpu_overlap: overlapped batches have other results than serial ones")
    local.check()
    found = {"trip": trip, "work": work_us}
    for name, step in (("serial", serial), ("overlapped", overlapped)):
        total, p99 = graph_us(lambda step=step: step(local, work, batches), options.replays)
        found[name], found[f"{name} p99"] = total / options.layers, p99 / options.layers
        local.check()
    short, long = sorted((trip, work_us))
    found["ideal"] = 2 * long + short / options.layers
    could = 2 * short - short / options.layers
    found = {name: round(us, 1) for name, us in found.items()}
    found["hidden"] = round((found["serial"] - found["overlapped"]) / could, 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, default in (("hidden", 2048), ("middle", 768), ("experts", 128), ("top-k", 8),
                          ("layers", 4), ("replays", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rows", default="32,128", help="of a micro-batch")
    parser.add_argument("--gpus", type=int, choices=(1, 2),
                        default=min(2, torch.cuda.device_count() or 1))
    options = parser.parse_args()
    if torch.cuda.device_count() < options.gpus:
        sys.exit(f"gpu_overlap: {torch.cuda.device_count()} GPUs are here")
    started = time.monotonic()
    sizes = [int(text) for text in options.rows.split(",")]
    facts: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "gpus": options.gpus, "hidden": options.hidden,
        "middle": options.middle, "experts": options.experts, "top_k": options.top_k,
        "layers": options.layers, "rows": {},
    }
    with experts_of(options, max(sizes)) as local, torch.inference_mode():
        for num_rows in sizes:
            found = {}
            layers = [draw(num_rows, options, layer) for layer in range(options.layers)]

            def trips(local=local, layers=layers) -> None:
                for layer, inputs in enumerate(layers):
                    local.moe(layer, *inputs)

            trip = graph_us(trips, options.replays)[0] / options.layers
            for name, work in (("idle", idle(trip, options)),
                               ("attention", attention(trip, num_rows, options))):
                found[name] = compare(local, work, trip, num_rows, options)
                print(f"{num_rows} rows, {name}:", found[name], flush=True)
            facts["rows"][num_rows] = found
    facts["seconds"] = round(time.monotonic() - started, 1)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
