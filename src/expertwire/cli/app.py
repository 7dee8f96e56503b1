"""The `expertwire` command. Each subcommand imports what it needs when it runs."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from typing import Annotated, Any

import typer

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode=None,
    pretty_exceptions_enable=False,  # its tracebacks may show local variables, the token too
    help="Serve the experts of a Mixture-of-Experts model as independent network services.",
)

RegistryOption = Annotated[
    str, typer.Option("--registry", metavar="HOST:PORT", help="where the registry listens")
]
JsonOption = Annotated[bool, typer.Option("--json", help="end with one JSON object")]
DtypeOption = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16; default: the checkpoint's")
]
Fp8Option = Annotated[
    bool, typer.Option("--fp8", help="send hidden states as fp8 e4m3 with scales: lossy")
]
DirectOption = Annotated[
    bool, typer.Option("--direct", help="store into the servers' memory without the work queue")
]
HcaOption = Annotated[
    str, typer.Option(metavar="soft|ucx|mlx5:DEVICE",
                      help="soft: one host; ucx, mlx5: several, docs/ucx.md, docs/mlx5.md")
]
MetricsOption = Annotated[
    str | None, typer.Option("--metrics-port", metavar="[HOST:]PORT",
                             help="Prometheus endpoint; needs 'expertwire[metrics]'")
]
DeviceOption = Annotated[
    str, typer.Option(help="of the attention side: cpu, or cuda[:N] for servers on GPUs")
]
DEFAULT_REGISTRY = "127.0.0.1:7700"
OF_THIS_PROCESS = object()  # in a context: `main` runs it, so that the process began for it
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def print_json(facts: dict[str, Any]) -> None:
    print(json.dumps(facts), flush=True)


@app.callback()
def tls_files(
    tls_cert: Annotated[str | None, typer.Option(metavar="FILE", help="registry: its certificate, "
                                                 "PEM; everything over TLS then")] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="registry: the key of it")]
    = None,
    tls_ca: Annotated[str | None, typer.Option(metavar="FILE", help="others: certificates that the "
                                               "registry's must be signed by")] = None,
) -> None:
    """Serve the experts of a Mixture-of-Experts model as independent network services."""
    if tls_cert or tls_key or tls_ca:
        from ..control import tls

        for name, file in ((tls.CERT, tls_cert), (tls.KEY, tls_key), (tls.CA, tls_ca)):
            if file:
                os.environ[name] = file  # for child processes, too


@app.command()
def demo(
    prompt: Annotated[str, typer.Option(help="text to continue")] = "def read_lines(path):\n",
    servers: Annotated[int, typer.Option(help="number of expert servers")] = 3,
    model: Annotated[str | None, typer.Option(help="checkpoint folder; default: the shipped one")]
    = None,
    seed: Annotated[int, typer.Option(help="random seed")] = 0,
    tokens: Annotated[int, typer.Option(min=1, help="tokens to generate")] = 96,
    picture: Annotated[str, typer.Option(help="where to write the timeline")]
    = "expertwire-demo.svg",
    fp8: Fp8Option = False,
    direct: DirectOption = False,
    hca: HcaOption = "soft",
    as_json: JsonOption = False,
) -> None:
    """Generate text with the experts in other processes, and compare with the whole model."""
    from ..config import ClientConfig
    from ..demo import run_demo

    result = run_demo(prompt=prompt, num_servers=servers, model_path=model, seed=seed,
                      max_new_tokens=tokens, picture=picture,
                      client_config=ClientConfig(fp8=fp8, do_ibgda=not direct, hca=hca))
    if as_json:
        print_json(result)
    if not result["equal_tokens"] and not fp8:  # rounded messages may choose other words
        raise typer.Exit(1)


@app.command()
def registry(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="address to listen on")]
    = DEFAULT_REGISTRY,
    lease: Annotated[float, typer.Option(help="seconds of silence until a server is removed")]
    = 10.0,
    state: Annotated[str | None, typer.Option(help="file that keeps the epoch over restarts")]
    = None,
    page_port: Annotated[str | None, typer.Option(metavar="[HOST:]PORT", help="serve a page with "
                         "the live picture; anybody who reaches it may read it")] = None,
    metrics_port: MetricsOption = None,
) -> None:
    """Run the registry that servers and clients find each other through."""
    from ..processes import stop_on_signals
    from ..registry.registry import Registry

    server = Registry(listen, lease_seconds=lease, state_path=state)
    stop_on_signals(server.close)
    server.start()
    if metrics_port or page_port:
        from .observe import look_at_registry

        look_at_registry(server, page_port, metrics_port)
    print(f"registry listening on {server.address}", flush=True)
    wait_for(server.serve_forever)


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="Hugging Face checkpoint folder")],
    experts: Annotated[str, typer.Option(help="ids as 0-15,40; or all; or auto")] = "auto",
    registry: RegistryOption = DEFAULT_REGISTRY,
    name: Annotated[str | None, typer.Option(help="name shown in status")] = None,
    dtype: DtypeOption = None,
    threads: Annotated[int | None, typer.Option(min=1, help="torch threads")] = None,
    room: Annotated[int | None, typer.Option(min=1, help="experts that it has memory for, which "
                                             "`rebalance` may fill")] = None,
    of: Annotated[int | None, typer.Option(min=1, help="with --experts auto: how many share")]
    = None,
    batch_invariant: Annotated[bool, typer.Option(help="same bits whatever else is in a batch")]
    = True,
    device: Annotated[str, typer.Option(help="cpu, or cuda[:N] for clients with a GPU, on this "
                                        "host: --device there, or cuda.remote")] = "cpu",
    metrics_port: MetricsOption = None,
    hca: HcaOption = "soft",
    data_listen: Annotated[str | None, typer.Option(metavar="HOST[:PORT]", help="with --hca ucx: "
                           "address for clients; default: the one towards the registry")] = None,
) -> None:
    """Serve some experts of a model."""
    from ..config import ServerConfig
    from ..control.frames import load_token, parse_address
    from ..model.config_file import parse_experts, stated_num_experts

    parse_address(registry)  # mistakes are told before torch is imported, which takes seconds
    count = stated_num_experts(model)
    if count is not None and experts not in ("all", "auto"):
        parse_experts(experts, count)
    from ..processes import stop_on_signals
    from ..serve import make_server, run_server

    server = make_server(
        model, experts, registry, name=name, dtype=dtype, token=load_token(), num_auto_servers=of,
        config=ServerConfig(num_threads=threads, batch_invariant=batch_invariant, room=room,
                            hca=hca, listen=data_listen),
        device=device,
    )
    server.start()
    stop_on_signals(server.close)
    if metrics_port:
        from .observe import look_at_server

        look_at_server(server, metrics_port)
    print(f"{server.name}: {len(server.shard.experts)} experts of {server.model['name']}, "
          f"registry {registry}", flush=True)
    if hasattr(server, "startup"):
        print(f"{server.name}: started after {server.startup}", flush=True)
    wait_for(lambda: run_server(server))


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="Hugging Face checkpoint folder")],
    prompt: Annotated[str, typer.Argument(help="text to continue")],
    registry: RegistryOption = DEFAULT_REGISTRY,
    tokens: Annotated[int, typer.Option(min=1, help="tokens to generate")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="random seed")] = None,
    dtype: DtypeOption = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="seconds to wait for servers")] = 5.0,
    fp8: Fp8Option = False,
    direct: DirectOption = False,
    device: DeviceOption = "cpu",
    hca: HcaOption = "soft",
    as_json: JsonOption = False,
) -> None:
    """Generate text with remote experts."""
    from ..config import ClientConfig
    from ..control.frames import load_token, parse_address
    from ..model.config_file import checkpoint_folder

    parse_address(registry)
    checkpoint_folder(model)
    from ..generate import run_generate

    result = run_generate(
        model, prompt, registry, max_new_tokens=tokens, temperature=temperature, seed=seed,
        as_json=as_json, token=load_token(), dtype=dtype, device=device,
        config=ClientConfig(
            connect_timeout=timeout, fp8=fp8, do_ibgda=not direct, hca=hca
        ),
    )
    if as_json:
        print_json(result)


@app.command()
def openai(
    model: Annotated[str, typer.Argument(help="Hugging Face checkpoint folder")],
    registry: RegistryOption = DEFAULT_REGISTRY,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on")] = 8000,
    dtype: DtypeOption = None,
    continuous_batching: Annotated[bool, typer.Option(help="batch requests as they come")] = True,
    timeout: Annotated[float, typer.Option(min=0.1, help="seconds to wait for servers")] = 5.0,
    fp8: Fp8Option = False,
    direct: DirectOption = False,
    device: DeviceOption = "cpu",
    hca: HcaOption = "soft",
) -> None:
    """Run transformers' OpenAI-compatible server with remote experts."""
    from ..config import ClientConfig
    from ..control.frames import load_token, parse_address
    from ..model.config_file import checkpoint_folder

    parse_address(registry)
    checkpoint_folder(model)
    from ..openai_server import run_openai

    run_openai(model, registry, host=host, port=port, dtype=dtype, token=load_token(),
               continuous_batching=continuous_batching, device=device,
               client_config=ClientConfig(
                   connect_timeout=timeout, fp8=fp8, do_ibgda=not direct, hca=hca
               ))


@app.command()
def status(
    registry: RegistryOption = DEFAULT_REGISTRY,
    watch: Annotated[bool, typer.Option("--watch", help="go on until Ctrl-C")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="with --watch: seconds between looks")]
    = 1.0,
    looks: Annotated[int | None, typer.Option(min=1, help="with --watch: end after so many")]
    = None,
    cluster: Annotated[str | None, typer.Option(metavar="NAME", help="of `expertwire up`: its "
                                                "processes, and its registry")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the servers and clients of a registry."""
    from ..observe.status import show_status, watch_status

    if cluster:
        from .cluster import show_cluster

        show_cluster(cluster, as_json, watch)
        return

    if watch:
        watch_status(registry, seconds=every, looks=looks, as_json=as_json)
        return
    facts = show_status(registry, quiet=as_json)
    if as_json:
        print_json(facts)


@app.command("compile")
def compile_(
    more: Annotated[list[str] | None, typer.Argument(metavar="[ARCH]...", help="more of --arch")]
    = None,
    arch: Annotated[list[str] | None, typer.Option(metavar="ARCH", help="GPU architectures, as "
                                                   "sm_90 sm_100, the default")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compile the device code for GPUs into the cubin cache; needs no GPU."""
    from ..cuda.cache import cache_folder
    from ..cuda.compile import DEFAULT_ARCHS, compile_device_code, nvrtc_version

    facts: dict[str, Any] = {"nvrtc": nvrtc_version(), "cache": str(cache_folder()), "archs": {}}
    for name in dict.fromkeys([*(arch or []), *(more or [])]) or DEFAULT_ARCHS:
        cubin = compile_device_code(name)
        facts["archs"][name] = {
            "kernels": cubin.kernels(), "bytes": len(cubin.code), "cached": cubin.cached,
            "seconds": round(cubin.seconds, 3),
        }
        if not as_json:
            print(f"{name}: {len(cubin.kernels())} kernels, {len(cubin.code)} bytes, "
                  + ("from the cache" if cubin.cached else f"{cubin.seconds:.1f} s"))
    if as_json:
        print_json(facts)


@app.command()
def chaos(
    plan: Annotated[
        str | None, typer.Argument(help="a plan's JSON file, or the name of a shipped one")] = None,
    model: Annotated[str | None, typer.Option(help="checkpoint folder; default: the shipped one")]
    = None,
    picture: Annotated[str, typer.Option(help="where to write the timeline")]
    = "expertwire-chaos.svg",
    list_plans: Annotated[
        bool, typer.Option("--list", help="the names of the shipped plans, and what each does")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Kill, stop, drain and start servers under load, and check every result."""
    from ..chaos.plan import load_plan, plan_names

    if list_plans:
        plans = {name: load_plan(name).about for name in plan_names()}
        if as_json:
            print_json(plans)
        else:
            print("\n".join(f"{name:20} {about}" for name, about in plans.items()))
        return
    if plan is None:
        raise typer.BadParameter("name a plan, or ask for the shipped ones with --list")
    from ..chaos.report import report_lines
    from ..chaos.run import run_chaos

    result = run_chaos(load_plan(plan), model=model, picture=picture)
    if as_json:
        print_json(result)
    else:
        print("\n".join(report_lines(result)), flush=True)
    if not result["ok"]:
        raise typer.Exit(1)


def wait_for(blocking) -> None:
    """Runs a blocking call in a way that signal handlers still get their turn; raises what it
    raises."""
    import threading

    failures: list[BaseException] = []

    def run() -> None:
        try:
            blocking()
        except BaseException as err:
            failures.append(err)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
    if failures:
        raise failures[0]


def main() -> None:
    """Entry point: errors of ours are one line, not a traceback."""
    from ..errors import ExpertwireError
    from ..processes import follow_parent, stop_on_signals

    stop_on_signals(lambda: None)
    follow_parent(lambda: os.kill(os.getpid(), signal.SIGTERM))  # also while still importing
    try:
        try:
            app(obj=OF_THIS_PROCESS)
        finally:
            if sys.stdout:  # what cannot be printed is an error of the command, not of its end
                sys.stdout.flush()
    except ExpertwireError as err:
        print("expertwire:", " ".join(str(err).split()), file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except OSError as err:
        if err.errno not in (errno.EPIPE, *NO_ROOM):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still to be flushed
        if err.errno == errno.EPIPE:
            raise SystemExit(141) from None
        where = f" to {err.filename}" if err.filename else ""
        print(f"expertwire: cannot write{where}: {err.strerror}", file=sys.stderr)
        raise SystemExit(1) from None
