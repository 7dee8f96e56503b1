"""Tokens per second of the shipped demo model, whole in one process against experts in three.

    python bench/decode.py [--tokens 64] [--rounds 3] [--servers 3] [--json]
                           [--batch-invariant | --no-batch-invariant]

In one run, in turns: the whole model here ("local"), and its attention side here with the experts
in server processes, with batch-invariant sums (one reply row per token and expert, fixed tiles)
and without (one reply row per token). Both are measured unless one is asked for. A step is one
decoded token; the prompt's step does not count. Medians over all steps. The stage table says where
the mean remote step's time goes: the client's stages over all MoE layers (`route` with the filling
of the kernels' arguments), the servers' own time in the experts (part of `wait`), and the rest,
which is attention, router, head and sampling.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import secrets
import statistics
from dataclasses import dataclass, field
from typing import Any

import torch

PROMPT = "def read_lines(path):\n"
STAGES = ("route", "pack", "put", "wait", "combine")
START_SECONDS = 180.0  # seven processes import torch at once


@dataclass
class Contestant:
    """One way to run the model, and what was measured of it."""

    model: Any
    client: Any = None
    steps_us: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    stages_ms: dict[str, float] = field(default_factory=dict)
    experts_us: float = 0.0  # of the slowest server of each layer, all steps
    num_traced: int = 0  # steps that the stage times belong to


def start_servers(stack: contextlib.ExitStack, path: str, num_servers: int, token: str,
                  batch_invariant: bool) -> str:
    """A registry and its servers as processes of their own; returns the registry's address."""
    from expertwire.demo import split_experts
    from expertwire.model.checkpoint import inspect_model
    from expertwire.processes import ChildGroup

    children = stack.enter_context(ChildGroup())
    env = {"EXPERTWIRE_TOKEN": token, "OMP_NUM_THREADS": "1"}
    registry = children.start("registry", ["registry", "--listen", "127.0.0.1:0"], env)
    address = registry.wait_line("listening on", START_SECONDS).split()[-1]
    invariant = "--batch-invariant" if batch_invariant else "--no-batch-invariant"
    for i, share in enumerate(split_experts(inspect_model(path).num_experts, num_servers)):
        children.start(
            f"server-{i}",
            ["serve", path, "--experts", share, "--registry", address, "--dtype", "float32",
             "--threads", "1", invariant], env,
        )
    return address


def attention_side(stack: contextlib.ExitStack, path: str, address: str, token: str,
                   batch_invariant: bool) -> Contestant:
    from expertwire import Client
    from expertwire import transformers as integration

    client = stack.enter_context(
        Client(address, token=token.encode(), batch_invariant=batch_invariant)
    )
    client.wait_ready(START_SECONDS)
    return Contestant(integration.load(path, client, dtype="float32"), client)


def whole_model(path: str) -> Contestant:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return Contestant(
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    )


def run_once(contestant: Contestant, tokenizer: Any, num_tokens: int, keep: bool) -> None:
    from expertwire.generate import generate

    client = contestant.client
    if client is not None:
        client.trace = []
    result = generate(contestant.model, tokenizer, PROMPT, max_new_tokens=num_tokens)
    trace = []
    if client is not None:
        trace, client.trace = client.trace, None
    contestant.token_ids = result.token_ids
    if not keep:
        return
    times = result.token_times_ns
    contestant.steps_us += [(b - a) / 1000 for a, b in itertools.pairwise(times)]
    if trace:
        add_stages(contestant, trace, times[0], times[-1], len(times) - 1)


def add_stages(contestant: Contestant, trace: list[dict], begin: int, end: int, num: int) -> None:
    """Adds up stage times of the layers within [begin, end): num decode steps."""
    totals = contestant.stages_ms
    trace = [e for e in trace if begin <= e.get("start_ns", e.get("sent_ns", 0)) < end]
    sends = [e for e in trace if e["kind"] == "send"]
    combines = [e for e in trace if e["kind"] == "combine"]
    for send, combine in zip(sends, combines, strict=False):
        edges = (send["start_ns"], send["routed_ns"], send["packed_ns"], send["put_ns"],
                 combine["start_ns"], combine["end_ns"])
        for stage, a, b in zip(STAGES, edges, edges[1:], strict=False):
            totals[stage] = totals.get(stage, 0.0) + (b - a) / 1e6
    slowest: dict[int, int] = {}  # put time of a batch -> its slowest server's time in the experts
    for e in trace:
        if e["kind"] == "reply":
            slowest[e["sent_ns"]] = max(slowest.get(e["sent_ns"], 0), e["experts_us"])
    contestant.experts_us += sum(slowest.values())
    contestant.num_traced += num


def summary(contestant: Contestant) -> dict[str, Any]:
    steps = sorted(contestant.steps_us)
    median = statistics.median(steps)
    facts: dict[str, Any] = {
        "tokens_per_s": round(1e6 / median, 2), "step_us": round(median, 1),
        "p90_us": round(steps[len(steps) * 9 // 10], 1), "steps": len(steps),
    }
    if contestant.num_traced:
        mean = sum(steps) / len(steps)
        stages = {s: contestant.stages_ms[s] * 1000 / contestant.num_traced for s in STAGES}
        facts["stages_us"] = {
            **{s: round(us, 1) for s, us in stages.items()},
            "experts_in_wait": round(contestant.experts_us / contestant.num_traced, 1),
            "rest": round(mean - sum(stages.values()), 1), "mean_step": round(mean, 1),
        }
    return facts


def run(num_tokens: int, rounds: int, num_servers: int, modes: list[bool]) -> dict[str, Any]:
    from expertwire.demo import demo_model_path
    from expertwire.generate import load_tokenizer

    path, token = demo_model_path(), secrets.token_hex(32)
    tokenizer = load_tokenizer(path)
    torch.set_num_threads(1)  # as the servers: a small model gains nothing from more
    names = {True: "batch_invariant", False: "plain"}
    with contextlib.ExitStack() as stack:
        contestants = {"local": whole_model(path)}
        addresses = {mode: start_servers(stack, path, num_servers, token, mode) for mode in modes}
        for mode, address in addresses.items():
            contestants[names[mode]] = attention_side(stack, path, address, token, mode)
        for turn in range(rounds + 1):
            for contestant in contestants.values():
                run_once(contestant, tokenizer, num_tokens if turn else 8, keep=turn > 0)
    results = {name: summary(contestant) for name, contestant in contestants.items()}
    local = contestants["local"]
    for name, contestant in contestants.items():
        if name != "local":
            ratio = results[name]["step_us"] / results["local"]["step_us"]
            results[name]["step_over_local"] = round(ratio, 3)
            results[name]["equal_tokens"] = contestant.token_ids == local.token_ids
    return {**results, "servers": num_servers, "tokens": num_tokens, "cores": os.cpu_count()}


def print_tables(facts: dict[str, Any]) -> None:
    print(f"{'':<16}{'tokens/s':>10}{'us/token':>11}{'p90 us':>11}{'/ local':>10}  same tokens")
    remote = [name for name in ("batch_invariant", "plain") if name in facts]
    for name in ("local", *remote):
        r = facts[name]
        print(f"{name:<16}{r['tokens_per_s']:>10.1f}{r['step_us']:>11.1f}{r['p90_us']:>11.1f}"
              f"{r.get('step_over_local', 1.0):>10.3f}  {r.get('equal_tokens', '')}")
    print("\nwhere the mean step's time goes, us (experts: slowest server of each layer)")
    columns = (*STAGES, "experts_in_wait", "rest", "mean_step")
    print(f"{'':<16}" + "".join(f"{c:>{max(len(c), 7) + 2}}" for c in columns))
    for name in remote:
        stages = facts[name]["stages_us"]
        print(f"{name:<16}" + "".join(f"{stages[c]:>{max(len(c), 7) + 2}.1f}" for c in columns))
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=64, help="tokens per generation")
    parser.add_argument("--rounds", type=int, default=3, help="generations of each contestant")
    parser.add_argument("--servers", type=int, default=3, help="expert server processes")
    parser.add_argument("--batch-invariant", action=argparse.BooleanOptionalAction, default=None,
                        help="only with, or only without; default: both")
    parser.add_argument("--json", action="store_true", help="only the JSON line, no tables")
    options = parser.parse_args()
    modes = [True, False] if options.batch_invariant is None else [options.batch_invariant]
    facts = run(options.tokens, options.rounds, options.servers, modes)
    if not options.json:
        print_tables(facts)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
