"""`expertwire plan`: sizes of a deployment, from a model's config and measured or given costs."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .app import JsonOption, app, print_json

if TYPE_CHECKING:
    from ..planning.costs import Costs
    from ..planning.predict import Prediction, Workload


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="folder with the model's config.json")],
    tokens: Annotated[int, typer.Option("--tokens-per-step", min=1, help="of each client")] = 1,
    clients: Annotated[int, typer.Option(min=1, max=100_000, help="attention clients")] = 1,
    device: Annotated[str, typer.Option(help="where the experts are: cpu, h200, or "
                                 "h200-nvlink: on other GPUs of the host")] = "cpu",
    cores: Annotated[int | None, typer.Option(min=1, help="CPUs that all servers and clients "
                                              "share; default: each has its own")] = None,
    links: Annotated[str | None, typer.Option(help="RATE:LATENCY, as 400Gbit:3us; default: memory "
                                              "of one host")] = None,
    trace: Annotated[str | None, typer.Option(help="costs from this trace, not the device's")]
    = None,
    attention_us: Annotated[float, typer.Option(min=0, help="of a client per layer")] = 0.0,
    memory_gb: Annotated[float, typer.Option(min=0, help="for weights per server; 0: no limit")]
    = 0.0,
    most: Annotated[int | None, typer.Option("--servers", min=1, help="there are at most")] = None,
    skew: Annotated[float, typer.Option(min=0, help="of the experts' load: r-th busiest gets "
                                        "1/r^SKEW")] = 0.0,
    loads: Annotated[str | None, typer.Option(help="JSON file: rows per expert, as `rebalance "
                                              "--json` has them")] = None,
    spare: Annotated[float, typer.Option(min=0, help="room for replicas, as a share")] = 0.25,
    as_json: JsonOption = False,
) -> None:
    """Plan expert servers and replicas, and predict a step's time and where it saturates."""
    from ..planning.costs import parse_link, with_link
    from ..planning.predict import as_dict, recommend, replicas, zipf_loads

    work = workload(model, tokens=tokens, clients=clients, attention_us=attention_us)
    costs = costs_of(device, trace, work)
    if cores is not None:
        costs = dataclasses.replace(costs, cores=cores)
    if links is not None:
        costs = with_link(costs, *parse_link(links))
    shares = read_loads(loads, work.num_experts) if loads else zipf_loads(work.num_experts, skew)
    memory = memory_gb * 1e9 if memory_gb else math.inf
    chosen, _ = recommend(work, costs, memory_bytes=memory, most=most)
    hot, imbalance = replicas(shares, chosen.servers, spare)
    _, without = replicas(shares, chosen.servers, 0.0)
    chosen, looked_at = recommend(work, costs, memory_bytes=memory, most=most,
                                  imbalance=imbalance)
    hot, imbalance = replicas(shares, chosen.servers, spare)
    facts: dict[str, Any] = {
        "servers": chosen.servers, "servers_per_client": chosen.servers / clients,
        "predictions": [as_dict(p) for p in looked_at], "step_us": round(chosen.step_us, 1),
        "saturates_at_clients": round(chosen.saturates_at, 2), "bound_by": chosen.bound_by,
        "replicas": hot, "imbalance": round(imbalance, 3),
        "imbalance_without_replicas": round(without, 3),
    }
    if as_json:
        print_json(facts)
    else:
        print("\n".join(lines(work, chosen, looked_at, facts)))


def lines(
    work: Workload, chosen: Prediction, looked_at: list[Prediction], facts: dict[str, Any]
) -> list[str]:
    out = [f"{work.num_layers} layers of {work.num_experts} experts, top-{work.top_k}; "
           f"{work.tokens} tokens per step, {work.clients} clients", "",
           f"{'servers':>8}{'GB each':>9}{'rows':>8}{'kB there+back':>15}{'experts us':>12}"
           f"{'layer us':>10}{'step ms':>9}{'busy':>6}  bound by"]
    out += [f"{'>' if p is chosen else ' '}{p.servers:>7}{p.weight_bytes / 1e9:>9.2f}{p.rows:>8.1f}"
            f"{p.message_bytes / 1e3:>15.1f}{p.experts_us:>12.1f}{p.layer_us:>10.1f}"
            f"{p.step_us / 1e3:>9.2f}{100 * p.busy:>5.0f}%  {p.bound_by}" for p in looked_at]
    out += ["", f"{chosen.servers} servers, {facts['servers_per_client']:g} per client; steps of "
                f"{chosen.step_us / 1e3:.2f} ms, "
                f"{work.tokens * work.clients / chosen.step_us * 1e6:.0f} tokens/s",
            f"saturates at {chosen.saturates_at:.1f} clients; bound by {chosen.bound_by}"]
    hot = facts["replicas"]
    if facts["imbalance_without_replicas"] > 1.01 and hot:
        shown = ", ".join(f"{expert} x{count}" for expert, count in list(hot.items())[:12])
        out.append(f"replicas: {shown}{', ...' if len(hot) > 12 else ''}; the busiest server over "
                   f"the mean: {facts['imbalance_without_replicas']:.2f} -> "
                   f"{facts['imbalance']:.2f}")
    return out


def workload(model: str, **asked: Any) -> Workload:
    """The model's sizes, from its config alone: no weights are needed."""
    from ..errors import ConfigError
    from ..model.checkpoint_facts import top_k_of
    from ..model.config_file import MIDDLE_SIZE_NAMES, NUM_EXPERTS_NAMES, stated_config
    from ..planning.predict import Workload

    config: Any = stated_config(model)
    if config is None:  # seconds, for torch and transformers
        from ..model.checkpoint import read_config

        config = read_config(model)
        config.dtype_bytes = getattr(getattr(config, "dtype", None), "itemsize", 2)

    def first(*names: str) -> int:
        for name in names:
            value = getattr(config, name, None)
            if isinstance(value, int) and value > 0:
                return value
        raise ConfigError(f"{model}: its config has none of {', '.join(names)}")

    dense = getattr(config, "first_k_dense_replace", 0) or 0
    return Workload(
        num_layers=first("num_hidden_layers") - dense,
        num_experts=first(*NUM_EXPERTS_NAMES),
        top_k=top_k_of(None, config), hidden_size=first("hidden_size"),
        middle_size=first(*MIDDLE_SIZE_NAMES), element_bytes=config.dtype_bytes,
        weight_bytes=config.dtype_bytes, **asked,
    )


def costs_of(device: str, trace: str | None, work: Workload) -> Costs:
    from ..errors import ConfigError
    from ..planning.costs import DEVICES, fit_costs, samples_of_trace
    from ..trace.summary import load_trace

    if device not in DEVICES:
        raise ConfigError(f"--device {device!r}: known are {', '.join(DEVICES)}; measure another "
                          "with --trace")
    if trace is None:
        return DEVICES[device]
    events = load_trace(trace)
    servers = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X" and e["name"] == "experts"}
    samples = samples_of_trace(events, max(1, work.num_experts // max(1, len(servers))))
    return fit_costs(samples, work.expert_bytes, work.pair_flops, work.top_k / work.num_experts)


def read_loads(path: str, num_experts: int) -> list[float]:
    """Shares per expert. Raises ConfigError for a file that does not have them."""
    from ..errors import ConfigError

    try:
        found = json.loads(Path(path).read_text())
        found = found["rows"] if isinstance(found, dict) else found
        rows = [float(value) for value in found]
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise ConfigError(f"--loads {path}: {err}; it is a JSON list of rows per expert, or "
                          "what `expertwire rebalance --json` prints") from err
    if len(rows) != num_experts:
        raise ConfigError(f"--loads {path}: {len(rows)} experts, the model has {num_experts}")
    if not all(0 <= value < math.inf for value in rows) or not 0 < sum(rows) < math.inf:
        raise ConfigError(f"--loads {path}: rows per expert are numbers of at least 0, not all 0")
    return [row / sum(rows) for row in rows]
