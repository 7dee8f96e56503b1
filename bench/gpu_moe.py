"""MoE layers with real experts inside one GPU: this path against transformers' built-in experts.

    python bench/gpu_moe.py [--hidden 2048] [--middle 768] [--experts 128] [--top-k 8]
                            [--layers 4] [--rows 1,8,32,128,512] [--replays 20] [--no-tiles]

Everything is timed as replays of a CUDA graph of all layers, median microseconds per layer; bf16,
random weights, ids drawn uniformly without repetition, fresh for each layer.

    experts   the two products and the gate alone, on rows that are grouped already:
              ours for several tile geometries, torch's grouped_mm, a loop of torch.mm per expert;
              "of floor" is the time of reading the busy experts' weights at the faster of the copy
              and read bandwidths measured here, divided by ours; "same bits": tiles whose results
              are those of the first, bit by bit
    layer     hidden rows in, summed rows out: LocalExperts on the caller's stream, with sums at
              the server, on its own stream; transformers' grouped_mm, eager and (few rows only)
              batched_mm experts
    stages    kernel times inside a layer of ours, from the profiler

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch
import transformers
from transformers.integrations import moe as builtin

from expertwire.cuda.experts import ANY, GpuExperts, Tiles
from expertwire.cuda.local import LocalExperts

TILES = {
    "16x64x128": Tiles(), "16x32x128": Tiles(outputs=32), "16x64x64s5": Tiles(inputs=64, stages=5),
    "16x128x64": Tiles(outputs=128, inputs=64), "16x64x128w8": Tiles(warps=8, stages=3),
    "32x64x128": Tiles(rows=32, stages=3), "64x64x64": Tiles(rows=64, inputs=64),
    "64x32x64": Tiles(rows=64, outputs=32, inputs=64),
    "64x32x128s3": Tiles(rows=64, outputs=32, stages=3),
    "64x128x64w8": Tiles(rows=64, outputs=128, inputs=64, warps=8, stages=3),
    "16|64x64x64": ANY, "16|64x64x64w2": Tiles(rows=64, inputs=64, warps=2, few_rows=16),
    "16|32x64x128": Tiles(rows=32, stages=3, few_rows=16),
}
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def graph_us(body: Callable[[], Any], replays: int) -> tuple[float, float]:
    """(median, 99th percentile) microseconds of one replay of what `body` enqueues."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.inference_mode():
        body()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            body()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 3)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        stream.synchronize()
    times = [1000 * a.elapsed_time(b) for a, b in pairwise(events)][2:]
    return statistics.median(times), sorted(times)[int(len(times) * 0.99)]


def copy_bandwidth() -> float:
    """Bytes per microsecond that a large copy moves, reading and writing counted."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    us, _ = graph_us(lambda: target.copy_(source), 10)
    return 2 * source.numel() / us


def read_bandwidth() -> float:
    """Bytes per microsecond that a large sum reads: what weights that are read once can get."""
    source = torch.randn(1 << 29, device="cuda")
    us, _ = graph_us(lambda: source.sum(), 10)
    return source.numel() * source.element_size() / us


def make_model(options: argparse.Namespace) -> Any:
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=options.hidden, num_hidden_layers=options.layers,
        num_attention_heads=16, num_key_value_heads=2, head_dim=64, intermediate_size=64,
        moe_intermediate_size=options.middle, num_experts=options.experts,
        num_experts_per_tok=options.top_k, tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model.eval()


def draw(num_rows: int, options: argparse.Namespace, seed: int) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(seed)
    kind = dict(generator=generator, device="cuda")
    hidden = torch.randn(num_rows, options.hidden, **kind).to(torch.bfloat16)
    ids = torch.rand(num_rows, options.experts, **kind).topk(options.top_k, dim=1).indices
    return hidden, ids, torch.rand(num_rows, options.top_k, **kind)


class Grouped:
    """A layer's rows as the gather leaves them."""

    def __init__(self, inputs: Inputs, layer: int, num_experts: int):
        hidden, ids, _ = inputs
        order = ids.flatten().sort()
        self.rows = hidden[order.indices // ids.shape[1]].contiguous()
        counts = torch.bincount(order.values, minlength=num_experts)
        self.offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        self.ends = self.offsets.tolist()
        self.num_busy = int((counts > 0).sum())
        self.layer = torch.tensor([layer], dtype=torch.int32, device="cuda")
        self.layer_idx = layer
        self.output = torch.empty_like(self.rows)

    def run_loop(self, experts: GpuExperts) -> None:
        first, down = experts.first.tensors, experts.down.tensors
        for e, (a, b) in enumerate(pairwise(self.ends)):
            if a == b:
                continue
            gate, up = torch.mm(self.rows[a:b], first[self.layer_idx][e].t()).chunk(2, dim=1)
            middle = torch.nn.functional.silu(gate) * up
            torch.mm(middle, down[self.layer_idx][e].t(), out=self.output[a:b])


def experts_alone(
    experts: GpuExperts, num_rows: int, options: argparse.Namespace, bandwidth: float
) -> dict[str, Any]:
    """Microseconds per layer of each way to run the experts."""
    layers = [
        Grouped(draw(num_rows, options, layer), layer, options.experts)
        for layer in range(options.layers)
    ]
    middle = experts.workspace(layers[0].rows.shape[0])

    def ours(tiles: Tiles) -> None:
        for layer in layers:
            experts.run(layer.layer, layer.rows, layer.offsets, middle, layer.output, tiles)

    def library() -> None:
        for layer in layers:
            experts.run_library(layer.layer_idx, layer.rows, layer.offsets)

    def loop() -> None:
        for layer in layers:
            layer.run_loop(experts)

    found: dict[str, Any] = {}
    first, same = None, []
    for name, tiles in (TILES if options.tiles else {"16x64x128": Tiles()}).items():
        found[name] = graph_us(lambda tiles=tiles: ours(tiles), options.replays)[0]
        output = layers[0].output.clone()
        first = output if first is None else first
        same += [name] if torch.equal(output, first) else []
    found["grouped_mm"] = graph_us(library, options.replays)[0]
    found["loop"] = graph_us(loop, options.replays)[0]
    found = {name: round(us / options.layers, 1) for name, us in found.items()}
    expert_bytes = experts.num_bytes() / (options.layers * options.experts)
    busy = statistics.mean(layer.num_busy for layer in layers)
    found["busy_experts"], found["same bits"] = busy, same
    found["floor"] = round(busy * expert_bytes / bandwidth, 1)
    if options.tiles:
        for name, tiles in (("invariant", "64x64x64"), ("by count", "16|64x64x64")):
            found[f"{name}, of floor"] = round(found["floor"] / found[tiles], 3)
        found["grouped_mm / invariant"] = round(found["grouped_mm"] / found["64x64x64"], 2)
    return found


def whole_layer(
    model: Any, locals_: dict[str, LocalExperts], num_rows: int, options: argparse.Namespace
) -> dict[str, float]:
    from expertwire.model.checkpoint import pluggable

    batches = [draw(num_rows, options, layer) for layer in range(options.layers)]
    modules = [module for _, module in pluggable(model)]

    def ours(local: LocalExperts) -> None:
        for layer, inputs in enumerate(batches):
            local.moe(layer, *inputs)

    def theirs(forward: Callable) -> None:
        for module, (hidden, ids, weights) in zip(modules, batches, strict=True):
            forward(module, hidden, ids, weights.to(hidden.dtype))

    found, want = {}, None
    for name, local in locals_.items():
        median, p99 = graph_us(lambda local=local: ours(local), options.replays)
        found[name], found[f"{name} p99"] = median, p99
        local.check()
        got = local.moe(1 % options.layers, *batches[0]).float()
        if want is None:
            hidden, ids, weights = batches[0]
            with torch.inference_mode():
                want = builtin.grouped_mm_experts_forward(
                    modules[1 % options.layers], hidden, ids, weights).float()
        if not (got - want).norm() < 2e-2 * want.norm():
            sys.exit(f"gpu_moe: {name} at {num_rows} rows: another result than the built-in one")
    found["grouped_mm"] = graph_us(
        lambda: theirs(builtin.grouped_mm_experts_forward), options.replays)[0]
    if num_rows <= 8:
        found["batched_mm"] = graph_us(
            lambda: theirs(builtin.batched_mm_experts_forward), options.replays)[0]
    return {name: round(us / options.layers, 1) for name, us in found.items()}


def stages(local: LocalExperts, num_rows: int, options: argparse.Namespace) -> dict[str, float]:
    """Microseconds of each kernel of a layer, from the profiler; empty if it sees nothing."""
    from torch.profiler import ProfilerActivity, profile

    inputs = draw(num_rows, options, 0)
    local.moe(0, *inputs)
    torch.cuda.synchronize()
    rounds = 10
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for i in range(rounds):
            local.moe(i % options.layers, *inputs)
        torch.cuda.synchronize()
    return {
        event.key: round(event.device_time_total / rounds, 1)
        for event in profiled.key_averages() if event.device_time_total > 0
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, default in (("hidden", 2048), ("middle", 768), ("experts", 128), ("top-k", 8),
                          ("layers", 4), ("replays", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rows", default="1,8,32,128,512")
    parser.add_argument("--no-tiles", dest="tiles", action="store_false",
                        help="the default tile geometry alone")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_moe: there is no GPU")
    started = time.monotonic()
    sizes = [int(text) for text in options.rows.split(",")]
    copy, read = copy_bandwidth(), read_bandwidth()
    bandwidth = max(copy, read)
    model = make_model(options)
    experts = GpuExperts.from_model(model)
    facts: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "copy_gb_s": round(copy / 1e3),
        "read_gb_s": round(read / 1e3),
        "hidden": options.hidden, "middle": options.middle, "experts": options.experts,
        "top_k": options.top_k, "alone": {}, "layer": {}, "stages": {},
    }
    print(f"copy {facts['copy_gb_s']} GB/s, read and written; reading {facts['read_gb_s']} GB/s")
    for num_rows in sizes:
        found = experts_alone(experts, num_rows, options, bandwidth)
        facts["alone"][num_rows] = found
        print(f"experts alone, {num_rows} rows:", found, flush=True)
    common = dict(max_rows=max(sizes))
    local = LocalExperts(experts, options.top_k, **common)
    sums = LocalExperts(experts, options.top_k, batch_invariant=False, **common)
    for num_rows in sizes:
        found = whole_layer(model, {"ours": local, "ours, sums": sums}, num_rows, options)
        with LocalExperts(experts, options.top_k, own_stream=True, **common) as own:
            found |= whole_layer(model, {"ours, own stream": own}, num_rows, options)
        facts["layer"][num_rows] = found
        print(f"layer, {num_rows} rows:", found, flush=True)
    for num_rows in (sizes[0], sizes[-1]):
        facts["stages"][num_rows] = stages(local, num_rows, options)
        print(f"stages, {num_rows} rows:", facts["stages"][num_rows], flush=True)
    facts["seconds"] = round(time.monotonic() - started, 1)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
