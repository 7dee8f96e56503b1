"""`expertwire demo`: the shipped model generates text with its experts in other processes.

Starts a registry and expert servers as separate OS processes, runs the attention side here, holds
no expert weights, and compares with the whole model run locally.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import ClientConfig
from .errors import ConfigError, NoServerError
from .model.config_file import stated_num_experts
from .observe.draw import Span, draw_step
from .processes import ChildGroup
from .zygote import Zygote

if TYPE_CHECKING:  # torch takes seconds to import, and `demo_model_path` needs none
    import torch

    from .generate import Generation

DEFAULT_PROMPT = "def read_lines(path):\n"
START_SECONDS = 60.0


def demo_model_path() -> str:
    """The checkpoint that ships with the package."""
    return str(Path(__file__).with_name("demo_model"))


def split_experts(num_experts: int, num_servers: int) -> list[str]:
    """Consecutive shares that differ by at most one expert, as --experts takes them."""
    if not 1 <= num_servers <= num_experts:
        raise ConfigError(f"--servers must be from 1 to {num_experts} for this model")
    edges = [num_experts * i // num_servers for i in range(num_servers + 1)]
    return [f"{a}-{b - 1}" for a, b in pairwise(edges)]


def run_demo(
    *, prompt: str = DEFAULT_PROMPT, num_servers: int = 3, model_path: str | None = None,
    seed: int = 0, max_new_tokens: int = 96, picture: str = "expertwire-demo.svg",
    quiet: bool = False, client_config: ClientConfig | None = None,
) -> dict[str, Any]:
    """Runs the demo; prints to stdout unless quiet. Returns the facts that --json prints."""
    path = model_path or demo_model_path()
    if (count := stated_num_experts(path)) is not None:
        split_experts(count, num_servers)  # told before anything starts
    # What the servers are forked from imports torch while this process does.
    with Zygote(path, {"OMP_NUM_THREADS": "1"}) as zygote:
        return demo_with(zygote, path, prompt, num_servers, seed, max_new_tokens, picture,
                         None if quiet else sys.stdout, client_config or ClientConfig())


def demo_with(
    zygote: Zygote, path: str, prompt: str, num_servers: int, seed: int, max_new_tokens: int,
    picture: str, out: Any, config: ClientConfig,
) -> dict[str, Any]:
    import torch

    from .model.checkpoint import inspect_model

    torch.set_num_threads(1)  # as the servers: the processes share the cores, the model is small
    info = inspect_model(path)
    shares = split_experts(info.num_experts, num_servers)
    token = secrets.token_hex(32)
    say(out, f"model {info.name}: {info.num_layers} MoE layers of {info.num_experts} experts, "
             f"top-{info.top_k}, hidden size {info.hidden_size}")
    with ChildGroup() as children:
        env = {"EXPERTWIRE_TOKEN": token}
        registry = children.start("registry", ["registry", "--listen", "127.0.0.1:0"], env)
        address = registry.wait_line("listening on", START_SECONDS).split()[-1]
        children.zygote = zygote
        for i, share in enumerate(shares):
            children.start(
                f"server-{i}",
                ["serve", path, "--experts", share, "--registry", address, "--name",
                 f"server-{i}", "--dtype", "float32", "--threads", "1", "--hca", config.hca],
                env,
            )
        say(out, f"registry at {address}; {num_servers} expert servers start as processes "
                 f"{[c.process.pid for c in children.children[1:]]}")
        try:
            remote, trace, times, stats, tokenizer, remote_logits = attention_side(
                path, address, token.encode(), prompt, seed, max_new_tokens, out, children,
                config,
            )
        except NoServerError:
            children.check()  # why a server is not there says more than that it is not
            raise
    local, local_logits = whole_model(path, tokenizer, prompt, remote, seed)
    difference = (remote_logits - local_logits).abs().max().item()
    where = draw_decode_step(picture, trace, times) if picture else None
    result = {
        "equal_tokens": remote.token_ids == local.token_ids,
        "max_logit_diff": difference,
        "tokens_per_s": round(remote.tokens_per_s, 2),
        "local_tokens_per_s": round(local.tokens_per_s, 2),
        "num_tokens": len(remote.token_ids),
        "servers": [{"name": name, **facts} for name, facts in sorted(stats["servers"].items())],
        "stages": stats["stages"],
        "picture": where,
        "text": remote.text,
        "model": info.name,
    }
    report(out, result)
    return result


def say(out: Any, text: str) -> None:
    if out is not None:
        print(text, file=out, flush=True)


def attention_side(
    path: str, address: str, token: bytes, prompt: str, seed: int, max_new_tokens: int, out: Any,
    children: ChildGroup, config: ClientConfig,
) -> tuple[Generation, list, list[int], dict, Any, torch.Tensor]:
    """Everything but the experts, in this process."""
    from . import transformers as integration
    from .client.client import Client
    from .generate import generate, load_tokenizer
    from .serve import load_progress

    with Client(address, token=token, name="demo", config=config) as client:
        tokenizer = load_tokenizer(path)
        start = time.monotonic()
        model = integration.load(
            path, client, dtype="float32", progress=load_progress("attention side")
        )
        wait_servers(client, children)
        say(out, f"attention side ready after {time.monotonic() - start:.1f} s, holds no expert "
                 f"weights\n\n{prompt}")
        generate(model, tokenizer, prompt, max_new_tokens=2, seed=seed)  # warm up
        client.trace = []
        result = generate(
            model, tokenizer, prompt, max_new_tokens=max_new_tokens, stream=out, seed=seed
        )
        trace, client.trace = client.trace, None
        stats = client.stats()
        logits = prompt_logits(model, tokenizer, prompt, result.token_ids)
    return result, trace, result.token_times_ns, stats, tokenizer, logits


def wait_servers(client: Any, children: ChildGroup) -> None:
    """Until every expert has a server. A child that ended instead ends the wait: its last words
    are the error."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        children.check()
        try:
            client.wait_ready(0.2)
            return
        except NoServerError:
            if time.monotonic() > deadline:
                raise


def whole_model(
    path: str, tokenizer: Any, prompt: str, remote: Generation, seed: int
) -> tuple[Generation, torch.Tensor]:
    """The same generation and logits from the model in one piece, experts and all."""
    import torch
    import transformers

    from .generate import generate
    from .transformers import quiet

    with quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    generate(model, tokenizer, prompt, max_new_tokens=2, seed=seed)
    local = generate(
        model, tokenizer, prompt, max_new_tokens=max(len(remote.token_ids), 1), seed=seed
    )
    return local, prompt_logits(model, tokenizer, prompt, remote.token_ids)


def prompt_logits(model: Any, tokenizer: Any, prompt: str, token_ids: list[int]) -> torch.Tensor:
    """Logits [positions, vocabulary] of the prompt and what was generated, in one pass."""
    import torch

    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    ids = torch.cat([ids, torch.tensor([token_ids], dtype=ids.dtype)], dim=1)
    with torch.inference_mode():
        return model(input_ids=ids).logits[0].float()


def draw_decode_step(path: str, trace: list[dict], token_times_ns: list[int]) -> str | None:
    """Draws the median decode step: what each side does when. Returns the file's path."""
    spans = median_step_spans(trace, token_times_ns)
    if not spans:
        return None
    try:
        draw_step(path, spans, "One decode step: attention here, experts in other processes")
    except OSError as err:
        print(f"expertwire: no picture: {err}; choose another --picture", file=sys.stderr)
        return None
    return os.path.abspath(path)


def median_step_spans(trace: list[dict], token_times_ns: list[int]) -> list[Span]:
    steps = sorted(zip(token_times_ns[1:], token_times_ns, strict=False), key=lambda s: s[0] - s[1])
    if not steps:
        return []
    end, begin = steps[len(steps) // 2]

    def us(ns: float) -> float:
        return (ns - begin) / 1000

    spans: list[Span] = []
    busy: list[tuple[float, float]] = []
    sends = [e for e in trace if e["kind"] == "send" and begin <= e["start_ns"] < end]
    combines = [e for e in trace if e["kind"] == "combine" and begin <= e["start_ns"] < end]
    for send, combine in zip(sends, combines, strict=False):
        for name, a, b in (
            ("route", send["start_ns"], send["routed_ns"]),
            ("pack", send["routed_ns"], send["packed_ns"]),
            ("put", send["packed_ns"], send["put_ns"]),
            ("wait", send["put_ns"], combine["start_ns"]),
            ("combine", combine["start_ns"], combine["end_ns"]),
        ):
            spans.append(Span("attention side", name, us(a), us(b)))
        busy.append((us(send["start_ns"]), us(combine["end_ns"])))
    at = 0.0
    for a, b in [*busy, (us(end), us(end))]:
        if a > at:
            spans.append(Span("attention side", "attention, router, head", at, a))
        at = max(at, b)
    for reply in trace:
        if reply["kind"] != "reply" or not begin <= reply["sent_ns"] < end:
            continue
        lane, sent, seen = reply["server_id"], us(reply["sent_ns"]), us(reply["seen_ns"])
        experts = min(float(reply["experts_us"]), seen - sent)
        travel = (seen - sent - experts) / 2  # the clocks differ: show the trip as symmetric
        spans.append(Span(lane, "trip", sent, sent + travel))
        spans.append(Span(lane, "experts", sent + travel, sent + travel + experts))
        spans.append(Span(lane, "trip", sent + travel + experts, seen))
    return spans


def report(out: Any, result: dict[str, Any]) -> None:
    """The closing summary and the table per server."""
    if out is None:
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(file=out, width=None if out.isatty() else 100)
    same = "equal" if result["equal_tokens"] else "DIFFERENT"
    console.print(
        f"\ngreedy token ids: [bold]{same}[/bold] to the local model's "
        f"({result['num_tokens']} tokens); largest logit difference "
        f"{result['max_logit_diff']:.2e}\n{result['tokens_per_s']:.1f} tokens/s remote, "
        f"{result['local_tokens_per_s']:.1f} local", highlight=False,
    )
    table = Table()
    for column in ("server", "experts", "rows", "messages", "sent", "received", "p50", "p99"):
        table.add_column(column, justify="left" if column == "server" else "right")
    for s in result["servers"]:
        table.add_row(
            s["name"], str(s["experts"]), str(s["rows"]), str(s["messages"]),
            f"{s['bytes_sent'] / 1e3:.1f} kB", f"{s['bytes_received'] / 1e3:.1f} kB",
            f"{s['p50_us']:.0f} us", f"{s['p99_us']:.0f} us",
        )
    console.print(table)
    if result["picture"]:
        console.print(f"where a decode step's time goes: {result['picture']}", highlight=False)
