"""Predicted against measured: calibrates on one configuration and predicts others.

    python bench/plan_check.py [--repeats 8] [--json]

Calibration: one model, one server, one client, four numbers of tokens, from a trace as
`expertwire plan --trace` reads it; and two sizes with two servers, for how they share the cores.
Predicted, and measured in the same rounds: other numbers of tokens, two servers, two
clients. Servers and the second client are in processes of their own; measured times are lower
deciles, the calibration looks at messages about there. Ends with how many of the predictions are
within the aim, 25 %, and the largest error.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from expertwire import Client, Registry
from expertwire.demo import split_experts
from expertwire.planning.costs import Costs, fit_costs, samples_of_trace
from expertwire.planning.predict import Workload, predict
from expertwire.trace import recorder as trace
from expertwire.trace.summary import load_trace

MODELS = {  # experts, top-k, hidden, middle
    "A": (16, 4, 128, 128),
}
CALIBRATED = (1, 4, 16, 64)
ROUNDS = 8
TWO_SERVERS = (4, 16)  # tokens of the sizes that say how two servers share the machine
QUANTILE = 0.1
WARM = 3  # layers that are not counted, each time
CASES = [  # model, servers, clients, tokens
    *(("A", 1, 1, tokens) for tokens in (1, 2, 8, 32, 128)),
    *(("A", 2, 1, tokens) for tokens in (2, 8, 64)),
    *(("A", 1, 2, tokens) for tokens in (2, 8, 16)),
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


def quantile(times: list[float]) -> float:
    """The lower decile: what a machine shows when others leave it alone."""
    return statistics.quantiles(times, n=10)[0]


class Others:
    """How many CPUs work that is none of ours has taken, since this object was made."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.monotonic(), self._all(), self._ours()

    @staticmethod
    def _all() -> float:
        """CPU seconds of everybody: user, nice, system, irq, softirq, steal (proc(5))."""
        fields = [int(text) for text in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
        return sum(fields[i] for i in (0, 1, 2, 5, 6, 7)) / os.sysconf("SC_CLK_TCK")

    @staticmethod
    def _ours() -> float:
        """CPU seconds of this process and the servers, which are its children."""
        ticks = 0
        for pid in (os.getpid(), *_children()):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def cpus(self) -> float:
        spent = self._all() - self._busy - (self._ours() - self._own)
        return max(0.0, spent) / (time.monotonic() - self._began)


def _children() -> list[int]:
    started = Path(f"/proc/self/task/{os.getpid()}/children")  # by the main thread
    return [int(pid) for pid in started.read_text().split()]


def timed(client: Client, given: list[tuple[torch.Tensor, ...]]) -> list[float]:
    """Microseconds of a layer, without the first WARM."""
    times = []
    for batch in given:
        start = time.perf_counter_ns()
        client.moe(0, *batch)
        times.append((time.perf_counter_ns() - start) / 1000)
    return times[WARM:]


class Another:
    """A second client, in a process of its own: threads of one would share the interpreter."""

    def __init__(self, process: subprocess.Popen):
        self._process = process

    def prepare(self, name: str, tokens: int, repeats: int) -> None:
        self._process.stdin.write(json.dumps([name, tokens, repeats]) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "prepared\n"

    def go(self) -> None:
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def times(self) -> list[float]:
        return json.loads(self._process.stdout.readline())


def be_another(registry: str) -> None:
    """The process of `Another`."""
    torch.set_num_threads(1)
    with torch.inference_mode(), Client(registry) as client:
        client.wait_ready(10)
        print("ready", flush=True)
        for line in sys.stdin:
            name, tokens, repeats = json.loads(line)
            given = batches(name, tokens, repeats + WARM, 1)
            print("prepared", flush=True)
            sys.stdin.readline()
            print(json.dumps(timed(client, given)), flush=True)


def layer_us(client: Client, name: str, tokens: int, repeats: int,
             another: Another | None = None) -> list[float]:
    """Times of a layer, of both clients if there are two, which work at the same time."""
    given = batches(name, tokens, repeats + WARM, 0)
    if another is None:
        return timed(client, given)
    another.prepare(name, tokens, repeats)
    another.go()
    return timed(client, given) + another.times()


def serve(facts: str) -> None:
    """One server of each entry [model folder, "A-B", registry, name], in this process: only one
    configuration works at a time, and starting takes most of the time otherwise."""
    from expertwire import Server
    from expertwire.model.config_file import parse_experts

    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        for path, experts, registry, name in json.loads(facts):
            server = stack.enter_context(Server.from_checkpoint(
                path, parse_experts(experts, 1 << 20), registry, name=name,
            ))
            server.wait_registered(10)
        print("ready", flush=True)
        sys.stdin.read()


class Rigs(contextlib.ExitStack):
    """(model, number of servers) -> a client; process i holds server i of every configuration.
    The first of them writes a trace. another: a second client of one server."""

    def __init__(self, paths: dict[str, str], file: Path):
        super().__init__()
        token = secrets.token_hex(32)
        self.clients: dict[tuple[str, int], Client] = {}
        shares: list[list[list[str]]] = [[], []]
        registries = {}
        for model, servers in dict.fromkeys(case[:2] for case in CASES):
            registry = self.enter_context(Registry("127.0.0.1:0", token=token.encode()))
            registries[model, servers] = registry
            for i, share in enumerate(split_experts(MODELS[model][0], servers)):
                shares[i].append([paths[model], share, registry.address, f"{model}-{i}"])
        jobs = [["--serve", json.dumps(share)] for share in shares]
        jobs.append(["--client", registries["A", 1].address])
        children = [
            self.enter_context(subprocess.Popen(
                [sys.executable, __file__, *job], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, text=True,
                env={**os.environ, "EXPERTWIRE_TOKEN": token, "OMP_NUM_THREADS": "1",
                     **({} if i else {"EXPERTWIRE_TRACE": str(file)})},
            )) for i, job in enumerate(jobs)
        ]
        for child in children:
            self.callback(child.stdin.close)
            if "ready" not in child.stdout.readline():
                raise SystemExit(f"a process ended with code {child.wait(5)}")
        self.another = Another(children[-1])
        for shape, registry in registries.items():
            self.clients[shape] = self.enter_context(Client(registry, token=token.encode()))
            self.clients[shape].wait_ready(10)


def calibrate(file: Path, two_servers: dict[int, float]) -> Costs:
    """From the trace of one server; and how much two slow each other down: their sizes' mean.

    two_servers: tokens -> us of a layer.
    """
    work = workload("A", 1)
    samples = samples_of_trace(load_trace(file), work.num_experts, QUANTILE)
    costs = fit_costs(samples, work.expert_bytes, work.pair_flops, work.top_k / work.num_experts)
    speeds = []
    for tokens, measured_us in two_servers.items():
        alone = predict(workload("A", tokens), 2, costs)
        served = alone.experts_us + min(costs.server_us, costs.trip_us)
        spent = measured_us - (alone.layer_us - served)  # with both servers at work
        speeds.append(min(1.0, max(0.1, served / max(spent, 1e-3))))
    return dataclasses.replace(costs, parallel=statistics.mean(speeds),
                               cores=len(os.sched_getaffinity(0)))


def check(
    rigs: Rigs, file: Path, repeats: int
) -> tuple[list[dict[str, Any]], Costs, float]:
    """In rounds, so that what else the machine does meets calibration and cases alike."""
    first = rigs.clients["A", 1]  # its server writes the trace, too
    layer_us(first, "A", 16, 10)
    calibrated = [("A", 2, 1, tokens) for tokens in TWO_SERVERS]
    times: dict[tuple, list[float]] = {case: [] for case in (*CASES, *calibrated)}
    others, order = Others(), random.Random(0)
    for _ in range(ROUNDS):
        with trace.tracing(file, name="client"):
            for tokens in CALIBRATED:
                layer_us(first, "A", tokens, repeats)
        for case in order.sample(list(times), len(times)):  # none is always after the same one
            model, servers, clients, tokens = case
            times[case] += layer_us(rigs.clients[model, servers], model, tokens, repeats,
                                    rigs.another if clients > 1 else None)
    busy_elsewhere = others.cpus()
    costs = calibrate(file, {case[3]: quantile(times[case]) for case in calibrated})
    rows = []
    for model, servers, clients, tokens in CASES:
        measured = quantile(times[model, servers, clients, tokens])
        expected = predict(workload(model, tokens, clients), servers, costs).layer_us
        rows.append({
            "model": model, "servers": servers, "clients": clients, "tokens": tokens,
            "predicted_us": round(expected, 1), "measured_us": round(measured, 1),
            "error": round(float(expected / measured) - 1, 3),
        })
    return rows, costs, busy_elsewhere


def run(repeats: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        folder = Path(name)
        paths = {model: make_model(model, folder) for model in MODELS}
        file = folder / "trace.json"
        with Rigs(paths, file) as rigs:
            rows, costs, others = check(rigs, file, repeats)
    return {"costs": vars(costs), "cases": rows, "cores": os.cpu_count(),
            "busy_elsewhere": round(others, 2),
            "within_a_quarter": sum(abs(row["error"]) <= 0.25 for row in rows),
            "largest_error": max(abs(row["error"]) for row in rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=8, help="layers measured per case")
    parser.add_argument("--json", action="store_true", help="only the JSON line, no table")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    if options.client:
        be_another(options.client)
        return
    facts = run(options.repeats)
    if not options.json:
        print(f"{'model':>6}{'servers':>9}{'clients':>9}{'tokens':>8}{'predicted us':>14}"
              f"{'measured us':>13}{'error':>8}")
        for row in facts["cases"]:
            print(f"{row['model']:>6}{row['servers']:>9}{row['clients']:>9}{row['tokens']:>8}"
                  f"{row['predicted_us']:>14.0f}{row['measured_us']:>13.0f}"
                  f"{100 * row['error']:>7.0f}%")
        print(f"{facts['within_a_quarter']} of {len(facts['cases'])} within 25 %; other work took "
              f"{facts['busy_elsewhere']:.2f} of {facts['cores']} CPUs meanwhile")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
