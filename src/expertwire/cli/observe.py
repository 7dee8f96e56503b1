"""Commands and options that look: `wqe decode`, `doctor`, `--metrics-port`, `--page-port`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from .app import OF_THIS_PROCESS, JsonOption, app, print_json

if TYPE_CHECKING:
    from ..cuda.service import ExpertService
    from ..registry.registry import Registry
    from ..server.server import Server



def look_at_registry(registry: Registry, page_port: str | None, metrics_port: str | None) -> None:
    """Starts the page and the metrics of a running registry; they end with the process.

    Without a host of their own they listen where the registry does.
    """
    from ..control.channel import parse_address
    from ..observe.web import listen_address

    host = parse_address(registry.address)[0]
    if metrics_port:
        from ..observe.metrics import registry_metrics, serve_metrics

        web = serve_metrics(listen_address(metrics_port, host), lambda: registry_metrics(registry))
        print(f"metrics at http://{web.address}/metrics", flush=True)
    if page_port:
        from ..page import serve_page

        web = serve_page(registry, listen_address(page_port, host))
        print(f"page at http://{web.address}/", flush=True)


def look_at_server(server: Server | ExpertService, metrics_port: str) -> None:
    """Starts the metrics of a running server; they end with the process."""
    from ..observe.metrics import serve_metrics, server_metrics
    from ..observe.web import listen_address

    web = serve_metrics(listen_address(metrics_port, "127.0.0.1"), lambda: server_metrics(server))
    print(f"metrics at http://{web.address}/metrics", flush=True)


wqe_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                      help="Work-queue entries, outside of a queue.")
app.add_typer(wqe_app, name="wqe")


@wqe_app.callback()
def wqe() -> None:
    """Work-queue entries, outside of a queue."""


@wqe_app.command("decode")
def wqe_decode(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="dumped rings, or the bytes "
                                               "of entries")],
    index: Annotated[int | None, typer.Option(min=0, help="of the first entry, for bytes without "
                                              "a head; default: what it says")] = None,
    last: Annotated[int | None, typer.Option(min=1, help="only so many of each ring")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the entries of a ring, and what an adapter would refuse. Ends with 1 if there is any."""
    from ..hca.ring import entries, read_rings, ring_lines

    rings = [(ring, entries(ring)) for file in files for ring in read_rings(file, index=index)]
    num_refused = sum(bool(e.verdict.refused) for _, found in rings for e in found)
    num_entries = sum(len(found) for _, found in rings)
    rings = [(ring, found[-(last or 0):]) for ring, found in rings]
    if as_json:
        print_json({
            "entries": num_entries, "refused": num_refused,
            "rings": [{
                "name": ring.name, "qpn": ring.qpn, "num_wqe": ring.num_wqe,
                "written": ring.written, "rung": ring.rung, "completed": ring.completed,
                "doorbell_record": ring.doorbell_record, "cqe": ring.cqe,
                "entries": [entry.as_dict() for entry in found],
            } for ring, found in rings],
        })
    else:
        for ring, found in rings:
            print("\n".join(ring_lines(ring, found)), end="\n\n")
        print(f"{num_entries} entries, {num_refused} that an adapter would refuse", flush=True)
    if num_refused:
        raise typer.Exit(1)


@app.command()
def doctor(
    context: typer.Context,
    need: Annotated[str, typer.Option(help="path that must work: cpu, gpu, nvlink, ucx or mlx5")]
    = "cpu",
    seconds: Annotated[float | None, typer.Option(min=0.5, help="time for all checks, where "
                                                  "importing torch takes long")] = None,
    as_json: JsonOption = False,
) -> None:
    """Say which paths work on this machine, why not, and what fixes it. Ends with 1 if the needed
    one does not, with 3 if that was not found out in time."""
    from ..doctor.report import LEAST, PATHS, SECONDS, as_dict, examine, process_age, report_lines
    from ..errors import ConfigError

    if need not in PATHS:
        raise ConfigError(f"--need {need!r}: it is one of {', '.join(PATHS)}")
    age = process_age() if context.obj is OF_THIS_PROCESS else 0.0
    begin = time.monotonic()
    found = examine(seconds=seconds or max(LEAST, SECONDS - age))
    facts = as_dict(found, need, age + time.monotonic() - begin)
    runs = facts["can_run"]
    if as_json:
        print_json(facts)
    else:
        print("\n".join(report_lines(found)))
        said = {True: "the job can run", False: "the job cannot run",
                None: "not found out in time whether the job can run"}[runs]
        print(f"{said} on {need} ({facts['seconds']:.1f} s)", flush=True)
    if runs is not True:
        raise typer.Exit(3 if runs is None else 1)
