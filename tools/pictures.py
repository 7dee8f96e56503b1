"""The pictures of the README and the docs, made anew.

    python tools/pictures.py [flow] [trace] [chaos]      # default: all, into docs/pictures

    flow   the stages of a batch, by name and file
    trace  the median batch of a traced run: `expertwire trace summary` of a small deployment
    chaos  `expertwire chaos short`, its timeline

All are SVG with a background of their own, for light and dark pages.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from xml.sax.saxutils import escape

from expertwire.observe.draw import PALETTE, text

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
MOST_BYTES = 150_000
CLIENT, WIRE, SERVER = PALETTE[0], PALETTE[5], PALETTE[2]
WIDTH, HEIGHT = 1200, 372
BOX_WIDTH, BOX_HEIGHT, STEP = 150, 62, 196


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return (f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='#1f2430' stroke-width='1.6' "
            "marker-end='url(#tip)'/>")


def box(x: float, y: float, name: str, place: str, colour: str) -> str:
    return (f"<rect x='{x}' y='{y}' width='{BOX_WIDTH}' height='{BOX_HEIGHT}' rx='6' "
            f"fill='{colour}'/>"
            + text(x + BOX_WIDTH / 2, y + 27, name, size=17, anchor="middle", weight="600",
                   fill="#ffffff")
            + text(x + BOX_WIDTH / 2, y + 48, place, size=11, anchor="middle", fill="#ffffff"))


def label(x: float, y: float, words: str) -> list[str]:
    return [f"<rect x='{x - 98}' y='{y - 15}' width='196' height='30' rx='6' fill='{WIRE}'/>",
            text(x, y + 5, words, size=13, anchor="middle", fill="#ffffff")]


def draw_flow(path: Path) -> None:
    """Two rows: the client's way out and the server's way back, with the HCA between them."""
    left, top, bottom = 90, 66, 248
    out = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{HEIGHT}' "
        f"viewBox='0 0 {WIDTH} {HEIGHT}' role='img'>",
        f"<title>{escape('A batch: client, work queue, server, and back')}</title>",
        "<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='8' "
        "markerHeight='8' orient='auto'><path d='M0 0 L8 4 L0 8 z' fill='#1f2430'/></marker>"
        "</defs>",
        "<rect width='100%' height='100%' fill='#ffffff'/>",
        f"<rect x='20' y='30' width='{WIDTH - 40}' height='120' rx='10' fill='#eef4fa'/>",
        f"<rect x='20' y='212' width='{WIDTH - 40}' height='130' rx='10' fill='#eaf6f1'/>",
        text(34, 52, "client: attention, router, key-value cache", size=13, fill="#3a4356"),
        text(34, 234, "expert servers: experts, no state", size=13, fill="#3a4356"),
        text(34, 332, "each may join, leave or die while the others go on", size=13,
             fill="#3a4356"),
    ]
    for i, (name, place) in enumerate((
        ("route", "top-k to servers"), ("pack", "one message each"), ("put", "three entries each"),
    )):
        x = left + 40 + STEP * i
        out.append(box(x, top, name, place, CLIENT))
        out.append(arrow(x - (46 if i else 36), top + 31, x - 4, top + 31))
    out.append(text(left - 54, top + 36, "tokens", size=14, weight="600"))
    combine = left + 40 + STEP * 4 - 40
    out += [box(combine, top, "combine", "sums in token order", CLIENT),
            arrow(combine + BOX_WIDTH, top + 31, combine + BOX_WIDTH + 36, top + 31),
            text(combine + BOX_WIDTH + 42, top + 36, "tokens", size=14, weight="600")]
    names = (("poll", "flags, checked heads"), ("gather", "rows by expert"),
             ("experts", "gate, up, down"), ("reply", "weighted rows"))
    shift = 60
    for i, (name, place) in enumerate(names):
        x = left + shift + 200 + STEP * i
        out.append(box(x, bottom, name, place, SERVER))
        if i:
            out.append(arrow(x - 46, bottom + 31, x - 4, bottom + 31))
    put_x, poll_x = left + 40 + STEP * 2 + 75, left + shift + 200 + 75
    reply_x, combine_x = left + shift + 200 + STEP * 3 + 75, combine + 75
    out += [
        arrow(put_x, top + BOX_HEIGHT, poll_x + 20, bottom - 4),
        arrow(reply_x, bottom, combine_x, top + BOX_HEIGHT + 5),
        *label((put_x + poll_x + 20) / 2, 181, "HCA: executes the entries"),
        *label((reply_x + combine_x) / 2, 181, "HCA: rows, head, flag"),
        "</svg>", "",
    ]
    path.write_text("\n".join(out))


def draw_trace(path: Path) -> None:
    """One client and two servers of the demo model, 16 tokens, traced."""
    import torch

    from expertwire import Client, Registry
    from expertwire.demo import demo_model_path
    from expertwire.processes import ChildGroup
    from expertwire.trace import recorder as trace
    from expertwire.trace.summary import draw_median, load_trace

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        with Registry("127.0.0.1:0") as registry, ChildGroup() as children:
            for i, share in enumerate(("0-7", "8-15")):
                children.start(f"server-{i}", [
                    "serve", demo_model_path(), "--experts", share, "--registry",
                    registry.address, "--name", f"server-{i}", "--threads", "1",
                ], {"EXPERTWIRE_TRACE": str(file), "OMP_NUM_THREADS": "1"})
            with Client(registry) as client:
                client.wait_ready(60)
                batch = (torch.randn(16, 128, dtype=torch.bfloat16), torch.randint(0, 16, (16, 2)),
                         torch.rand(16, 2))
                for _ in range(50):
                    client.moe(0, *batch)
                with trace.tracing(file, name="client"):
                    for step in range(200):
                        client.moe(step % 4, *batch)
        if draw_median(load_trace(file), path) is None:
            raise SystemExit("the trace has no whole batch")


def draw_chaos_short(path: Path) -> None:
    from expertwire.chaos.plan import load_plan
    from expertwire.chaos.run import run_chaos

    result = run_chaos(load_plan("short"), picture=str(path), quiet=True)
    if not result["ok"]:
        raise SystemExit(f"chaos short: {result['problems']}")


PICTURES = {"flow": draw_flow, "trace": draw_trace, "chaos": draw_chaos_short}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PICTURES)}; default: all")
    parser.add_argument("--into", default=str(FOLDER), help="folder; default: docs/pictures")
    options = parser.parse_args()
    for name in options.names or PICTURES:
        if name not in PICTURES:
            parser.error(f"{name!r} is none of {', '.join(PICTURES)}")
    folder = Path(options.into)
    folder.mkdir(parents=True, exist_ok=True)
    for name in options.names or PICTURES:
        path = folder / f"{name}.svg"
        PICTURES[name](path)
        size = path.stat().st_size
        print(f"{path}: {size} bytes", flush=True)
        if size > MOST_BYTES:
            sys.exit(f"{path} is larger than {MOST_BYTES} bytes")


if __name__ == "__main__":
    main()
