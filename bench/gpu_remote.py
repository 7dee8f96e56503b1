"""A MoE layer whose experts are in another process, on another GPU, beside the same layer here.

    python bench/gpu_remote.py [--rows 1,8,32,128] [sizes as gpu_moe.py]

The server process makes the same model and serves all its experts; this process has it too, on the
first GPU (with one GPU both are on it, which says nothing about time). Replays of a CUDA graph of
all layers, median microseconds per layer:

    experts   the products alone, on rows that are grouped already, here
    built-in  transformers' grouped_mm experts, here
    local     LocalExperts, here, on the caller's stream: the same kernels without the other GPU
    remote    RemoteExperts: hidden rows to the server's GPU, experts, rows back; "sums": a row per
              token back (batch_invariant=False), else a row per token and expert
    trip      rows there and back with an echo for a server (the kernels of gpu_trip.py), a row per
              token either way
    over      remote - local - trip, sums on both sides, and as a share of local: aimed at 0.05 or
              less; and the same against the built-in experts

Results of remote and local must be the same bits. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch
from transformers.integrations import moe as builtin

from child import Child, end_with_parent
from expertwire.cuda.experts import GpuExperts
from expertwire.cuda.layers import GpuLayers
from expertwire.cuda.local import LocalExperts
from expertwire.cuda.remote import RemoteExperts
from expertwire.cuda.service import ExpertService
from expertwire.model.checkpoint import ModelInfo, pluggable
from expertwire.registry.registry import Registry
from gpu_moe import Grouped, draw, graph_us, make_model

TOKEN = b"a token of this benchmark"
SIZES = (("hidden", 2048), ("middle", 768), ("experts", 128), ("top-k", 8), ("layers", 4),
         ("replays", 30))


def serve(options: argparse.Namespace) -> None:
    """The other process."""
    end_with_parent()
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    torch.cuda.set_device(device)
    experts = GpuExperts.from_model(make_model(options))
    info = ModelInfo(
        fingerprint="gpu_remote", name=experts.name, model_type=experts.name,
        num_layers=experts.num_layers, num_experts=options.experts, hidden_size=options.hidden,
        top_k=options.top_k, dtype="bfloat16",
    )
    with ExpertService(experts, info.as_dict(), options.registry, token=TOKEN) as service:
        service.wait_registered(20)
        print("ready", flush=True)
        print(f"server: started after {service.startup}", file=sys.stderr, flush=True)
        service.serve_forever()


@contextlib.contextmanager
def server_process(options: argparse.Namespace) -> Iterator[str]:
    """A registry's address, once a server in another process is there."""
    arguments = [f"--{name}={getattr(options, name.replace('-', '_'))}" for name, _ in SIZES]
    with Registry("127.0.0.1:0", token=TOKEN) as registry:
        command = [sys.executable, __file__, "--registry", registry.address, *arguments]
        with Child("experts", command) as child:
            child.wait_ready()
            yield registry.address


class Trip:
    """Rows there and back with nothing in between."""

    def __init__(self, hidden_size: int):
        import gpu_rig
        import gpu_trip
        from expertwire.target import GpuTarget

        last = torch.cuda.device_count() - 1
        gpu_rig.reach_each_other([0, last])
        gpu_rig.HIDDEN_SIZE = gpu_trip.HIDDEN_SIZE = hidden_size
        self._trip, self._bench = gpu_trip, gpu_trip.Bench(GpuTarget(0), GpuTarget(last), 20)

    def us(self, num_rows: int) -> float:
        grids = self._trip.grids_for(num_rows)
        return self._trip.best(lambda grid: self._bench.ours(num_rows, grid), grids)["us"]


def compare(num_rows: int, local: LocalExperts, remote: RemoteExperts,
            options: argparse.Namespace) -> dict[str, float]:
    """Microseconds per layer of both; the same bits."""
    batches = [draw(num_rows, options, layer) for layer in range(options.layers)]
    for layer, batch in enumerate(batches):
        want = local.moe(layer, *batch)
        if not torch.equal(remote.moe(layer, *batch), want) or not want.isfinite().all():
            sys.exit(f"gpu_remote: {num_rows} rows, layer {layer}: not the local experts' bits")

    def ours(of: GpuLayers) -> None:
        for layer, batch in enumerate(batches):
            of.moe(layer, *batch)

    found = {}
    for name, of in (("local", local), ("remote", remote)):
        total, p99 = graph_us(functools.partial(ours, of), options.replays)
        found[name], found[f"{name} p99"] = total / options.layers, p99 / options.layers
        of.check()
    return found


def without_servers(num_rows: int, model: Any, experts: GpuExperts, options: argparse.Namespace
                    ) -> dict[str, float]:
    """Microseconds per layer of the products alone, and of the built-in experts."""
    batches = [draw(num_rows, options, layer) for layer in range(options.layers)]
    modules = [module for _, module in pluggable(model)]
    grouped = [Grouped(batch, i, options.experts) for i, batch in enumerate(batches)]
    middle = experts.workspace(grouped[0].rows.shape[0])

    def alone() -> None:
        for layer in grouped:
            experts.run(layer.layer, layer.rows, layer.offsets, middle, layer.output)

    def theirs() -> None:
        for module, (hidden, ids, weights) in zip(modules, batches, strict=True):
            builtin.grouped_mm_experts_forward(module, hidden, ids, weights.to(hidden.dtype))

    return {name: graph_us(body, options.replays)[0] / options.layers
            for name, body in (("experts", alone), ("built-in", theirs))}


def with_differences(found: dict[str, float]) -> dict[str, float]:
    found = {name: round(us, 1) for name, us in found.items()}
    for against in ("local, sums", "built-in"):
        over = found["remote, sums"] - found[against] - found["trip"]
        found[f"over {against}"] = round(over, 1)
        found[f"share of {against}"] = round(over / found[against], 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, default in SIZES:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rows", default="1,8,32,128")
    parser.add_argument("--registry", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_remote: there is no GPU")
    if options.registry:
        return serve(options)
    started = time.monotonic()
    sizes = [int(text) for text in options.rows.split(",")]
    model = make_model(options)
    experts = GpuExperts.from_model(model)
    with server_process(options) as registry:
        ready = round(time.monotonic() - started, 1)
        rows: dict[int, dict[str, float]] = {num_rows: {} for num_rows in sizes}
        connected = 0.0
        # One client at a time: an idle one's server looks for messages, too.
        for kind, invariant in (("", True), (", sums", False)):
            common = dict(max_rows=max(sizes), batch_invariant=invariant)
            with LocalExperts(experts, options.top_k, **common) as local, RemoteExperts(
                    registry, token=TOKEN, device=0, connect_timeout=60.0, **common) as remote:
                connected = connected or round(time.monotonic() - started, 1)
                for num_rows in sizes:
                    found = compare(num_rows, local, remote, options)
                    rows[num_rows] |= {name + kind: us for name, us in found.items()}
                    print(f"{num_rows} rows{kind}:", found, flush=True)
        trip = Trip(options.hidden)
        for num_rows in sizes:
            rows[num_rows] |= without_servers(num_rows, model, experts, options)
            rows[num_rows]["trip"] = trip.us(num_rows)
            rows[num_rows] = with_differences(rows[num_rows])
            print(f"{num_rows} rows:", rows[num_rows], flush=True)
    print(json.dumps({
        "gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count(),
        **{name: getattr(options, name.replace("-", "_")) for name, _ in SIZES}, "rows": rows,
        "ready_s": ready, "connected_s": connected, "seconds": round(time.monotonic() - started, 1),
    }))
    return None


if __name__ == "__main__":
    main()
