"""Predicted against measured: calibrates on one configuration and predicts others.

    python bench/plan_check.py [--repeats 25] [--json]

Calibration: one model, one server, one client, four numbers of tokens, from a trace as
`expertwire plan --trace` reads it; and how much two busy threads slow each other down here.
Predicted and then measured: other numbers of tokens, two servers, two clients, another model. Each
configuration is a registry, `expertwire serve` processes and clients, as a user would run them.
Ends with the largest error; the aim is 25 %.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from expertwire import Client, Registry, trace
from expertwire.plan_costs import Costs, fit_costs, samples_of_trace
from expertwire.planner import Workload, predict
from expertwire.processes import ChildGroup
from expertwire.trace_summary import load_trace

MODELS = {  # experts, top-k, hidden, middle
    "A": (16, 4, 256, 512),
    "B": (32, 2, 384, 256),
}
CALIBRATED = (1, 4, 16, 64)
CASES = [  # model, servers, clients, tokens
    *(("A", 1, 1, tokens) for tokens in (1, 2, 8, 32, 128)),
    *(("A", 2, 1, tokens) for tokens in (1, 8, 64)),
    *(("A", 1, 2, tokens) for tokens in (2, 16)),
    *(("B", 1, 1, tokens) for tokens in (1, 4, 16, 64)),
    *(("B", 2, 1, tokens) for tokens in (4, 32)),
]


def make_model(name: str, folder: Path) -> str:
    import transformers

    experts, top_k, hidden, middle = MODELS[name]
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=hidden, intermediate_size=middle, moe_intermediate_size=middle,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, head_dim=16,
        num_experts=experts, num_experts_per_tok=top_k, decoder_sparse_step=1,
    )
    path = str(folder / name)
    with torch.device("meta"):  # its own initialisation takes seconds
        model = transformers.Qwen3MoeForCausalLM(config).to(torch.float32)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.uniform_(-0.05, 0.05)
    model.save_pretrained(path)
    return path


def workload(name: str, tokens: int, clients: int = 1) -> Workload:
    experts, top_k, hidden, middle = MODELS[name]
    return Workload(num_layers=1, num_experts=experts, top_k=top_k, hidden_size=hidden,
                    middle_size=middle, tokens=tokens, clients=clients, element_bytes=4,
                    weight_bytes=4)


def batches(name: str, tokens: int, count: int, seed: int) -> list[tuple[torch.Tensor, ...]]:
    """Every token has top_k different experts, drawn at random."""
    experts, top_k, hidden, _ = MODELS[name]
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(tokens, hidden, generator=generator),
             torch.rand(tokens, experts, generator=generator).topk(top_k).indices,
             torch.rand(tokens, top_k, generator=generator)) for _ in range(count)]


def layer_us(clients: list[Client], name: str, tokens: int, repeats: int) -> float:
    """Median time of a layer over all clients, which work at the same time."""
    times: list[list[float]] = [[] for _ in clients]
    barrier = threading.Barrier(len(clients))

    def work(i: int) -> None:
        given = batches(name, tokens, repeats + 3, i)
        barrier.wait(30)
        for n, batch in enumerate(given):
            start = time.perf_counter_ns()
            clients[i].moe(0, *batch)
            if n >= 3:
                times[i].append((time.perf_counter_ns() - start) / 1000)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statistics.median(time for found in times for time in found)


def parallel_speed(seconds: float = 0.6) -> float:
    """How fast a thread reads weights while another does, over its speed alone."""
    def rate(count: int) -> float:
        done = [0] * count
        stop = threading.Event()

        def work(i: int) -> None:
            weights, rows = torch.randn(24, 1024, 512), torch.randn(4, 512)
            while not stop.is_set():
                for weight in weights:
                    rows @ weight.t()
                done[i] += 1

        threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        stop.set()
        for thread in threads:
            thread.join()
        return sum(done) / count
    alone = rate(1)
    return min(1.0, rate(2) / alone)


class Rig(contextlib.ExitStack):
    """Registry, servers as processes, clients here."""

    def __init__(self, path: str, servers: int, clients: int, env: dict[str, str]):
        super().__init__()
        token = secrets.token_hex(32)
        registry = self.enter_context(Registry("127.0.0.1:0", token=token.encode()))
        children = self.enter_context(ChildGroup())
        for i in range(servers):
            children.start(f"server-{i}", [
                "serve", path, "--experts", "auto", "--of", str(servers), "--registry",
                registry.address, "--name", f"server-{i}", "--threads", "1",
            ], {"EXPERTWIRE_TOKEN": token, "OMP_NUM_THREADS": "1", **env})
        self.clients = [self.enter_context(Client(registry, token=token.encode()))
                        for _ in range(clients)]

    def wait_ready(self) -> None:
        for client in self.clients:
            client.wait_ready(90)


def calibrate(client: Client, file: Path, repeats: int, parallel: float) -> Costs:
    """The client's server writes the trace at `file` already."""
    with trace.tracing(file, name="client"):
        for tokens in CALIBRATED:
            layer_us([client], "A", tokens, repeats)
    work = workload("A", 1)
    samples = samples_of_trace(load_trace(file), work.num_experts)
    return fit_costs(samples, work.expert_bytes, work.pair_flops, work.top_k / work.num_experts,
                     parallel)


def run(repeats: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        folder = Path(name)
        paths = {model: make_model(model, folder) for model in MODELS}
        file = folder / "trace.json"
        with contextlib.ExitStack() as stack:
            rigs = {}
            for model, servers in dict.fromkeys(case[:2] for case in CASES):
                env = {} if rigs else {"EXPERTWIRE_TRACE": str(file)}
                rigs[model, servers] = stack.enter_context(Rig(paths[model], servers, 2, env))
            for rig in rigs.values():
                rig.wait_ready()
            rows, costs = check(rigs, file, repeats)
    return {"costs": vars(costs), "cases": rows, "cores": os.cpu_count(),
            "largest_error": max(abs(row["error"]) for row in rows)}


def check(
    rigs: dict[tuple[str, int], Rig], file: Path, repeats: int
) -> tuple[list[dict[str, Any]], Costs]:
    first = rigs[CASES[0][:2]].clients[0]
    layer_us([first], "A", 16, 10)
    costs = calibrate(first, file, repeats, parallel_speed())
    rows = []
    for model, servers, clients, tokens in CASES:
        measured = layer_us(rigs[model, servers].clients[:clients], model, tokens, repeats)
        expected = predict(workload(model, tokens, clients), servers, costs).layer_us
        rows.append({
            "model": model, "servers": servers, "clients": clients, "tokens": tokens,
            "predicted_us": round(expected, 1), "measured_us": round(measured, 1),
            "error": round(expected / measured - 1, 3),
        })
    return rows, costs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=25, help="layers measured per case")
    parser.add_argument("--json", action="store_true", help="only the JSON line, no table")
    options = parser.parse_args()
    facts = run(options.repeats)
    if not options.json:
        print(f"{'model':>6}{'servers':>9}{'clients':>9}{'tokens':>8}{'predicted us':>14}"
              f"{'measured us':>13}{'error':>8}")
        for row in facts["cases"]:
            print(f"{row['model']:>6}{row['servers']:>9}{row['clients']:>9}{row['tokens']:>8}"
                  f"{row['predicted_us']:>14.0f}{row['measured_us']:>13.0f}"
                  f"{100 * row['error']:>7.0f}%")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
