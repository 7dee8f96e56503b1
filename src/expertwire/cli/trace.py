"""`expertwire trace`: put a trace together, and say where its time went."""

from __future__ import annotations

from typing import Annotated

import typer

from .app import JsonOption, app, print_json

trace = typer.Typer(
    no_args_is_help=True, help="Traces that EXPERTWIRE_TRACE=FILE makes: merge, summary."
)
app.add_typer(trace, name="trace")
FileArgument = Annotated[str, typer.Argument(help="the file that EXPERTWIRE_TRACE named")]


@trace.command()
def merge(
    file: FileArgument,
    parts: Annotated[list[str] | None, typer.Argument(help="parts brought from other hosts")]
    = None,
) -> None:
    """Make the trace of what processes wrote: after a kill -9, or while they still run."""
    from ..trace.chrome import merge

    print(merge(file, parts or []))


@trace.command()
def summary(
    file: FileArgument,
    picture: Annotated[str, typer.Option(help="where to draw the median batch; '' for nowhere")]
    = "expertwire-trace.svg",
    as_json: JsonOption = False,
) -> None:
    """Print where the time went, and draw the median batch. Open FILE in ui.perfetto.dev."""
    from ..errors import ConfigError
    from ..trace.summary import draw_median, lines, load_trace, summarise

    events = load_trace(file)
    result = summarise(events)
    drawn = None
    if picture:
        try:
            drawn = result["picture"] = draw_median(events, picture)
        except OSError as err:
            raise ConfigError(f"no picture: {err}; choose another --picture") from err
    if as_json:
        print_json(result)
        return
    print("\n".join(lines(result)))
    if drawn is not None:
        print(f"\nthe median batch: {drawn['path']}")
