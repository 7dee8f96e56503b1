"""Commands that run a whole cluster: `up`, `down`, `scale`, `logs`, and `status --cluster`."""

from __future__ import annotations

from typing import Annotated

import typer

from .app import JsonOption, app, print_json

OnOption = Annotated[
    str | None, typer.Option("--on", metavar="local|ray", help="where it runs, for a YAML file of "
                             "a cluster that was started elsewhere")
]
WhichArgument = Annotated[
    str | None, typer.Argument(metavar="CLUSTER", help="its name or YAML file; default: the only "
                               "one that was started from here")
]


@app.command()
def up(
    config: Annotated[str, typer.Argument(metavar="CONFIG.yaml", help="what to start")],
    on: Annotated[str, typer.Option("--on", metavar="local|ray", help="local: processes of this "
                                    "host; ray: a Ray cluster, needs 'expertwire[ray]'")] = "local",
    timeout: Annotated[float, typer.Option(min=1, help="seconds until all servers serve")] = 600.0,
    as_json: JsonOption = False,
) -> None:
    """Start a registry and expert servers from a YAML file; returns when all of them serve."""
    from ..cluster.manage import report_lines
    from ..cluster.manage import up as start

    facts = start(config, on, timeout=timeout, quiet=as_json)
    print_json(facts) if as_json else print("\n".join(report_lines(facts)))


@app.command()
def down(
    cluster: WhichArgument = None,
    on: OnOption = None,
    forget: Annotated[bool, typer.Option("--forget", help="only drop what is noted here about a "
                                         "cluster whose Ray is gone")] = False,
) -> None:
    """End a cluster that `up` started; nothing of it stays."""
    from ..cluster.manage import down as end

    name = end(cluster, on, forget=forget)
    print(f"{name} is {'forgotten' if forget else 'down'}")


@app.command()
def scale(
    servers: Annotated[int, typer.Option("--servers", min=1, help="how many there should be")],
    cluster: WhichArgument = None,
    on: OnOption = None,
    timeout: Annotated[float, typer.Option(min=1, help="seconds for each server to come or to "
                                           "leave")] = 600.0,
    as_json: JsonOption = False,
) -> None:
    """Start more servers of a cluster, or drain some of them, while clients go on."""
    from ..cluster.manage import report_lines
    from ..cluster.manage import scale as change

    facts = change(cluster, servers, where=on, timeout=timeout, quiet=as_json)
    print_json(facts) if as_json else print("\n".join(report_lines(facts)))


@app.command()
def logs(
    process: Annotated[str, typer.Argument(help="as `expertwire status --cluster` shows it: "
                                           "registry, server-0, ...")],
    cluster: Annotated[str | None, typer.Option(metavar="CLUSTER", help="its name or YAML file; "
                                                "default: the only one")] = None,
    lines: Annotated[int, typer.Option(min=1, help="how many, the last ones")] = 50,
    on: OnOption = None,
) -> None:
    """Print what a process of a cluster said."""
    from ..cluster.manage import find_cluster

    print("\n".join(find_cluster(cluster, on)[1].log(process, lines)))


def show_cluster(which: str, as_json: bool, watch: bool) -> None:
    """`expertwire status --cluster`: the processes, then what the registry knows. Raises
    ConfigError with `watch`, which goes with --registry."""
    from ..cluster.manage import find_cluster, report, report_lines
    from ..errors import ConfigError
    from ..observe.status import show_status

    name, backend = find_cluster(which, None)
    if watch:
        raise ConfigError("--watch goes without --cluster; its registry is --registry "
                          + backend.registry_address())
    facts = report(name, backend)
    if as_json:
        print_json({**show_status(facts["registry"], quiet=True), "cluster": facts})
        return
    print("\n".join(report_lines(facts)), end="\n\n", flush=True)
    show_status(facts["registry"])
