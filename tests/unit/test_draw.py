"""The timeline picture: an SVG that parses, with every text in its place, whatever the spans."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET

import pytest

from expertwire.observe.draw import WIDTH, Span, draw_step, step_svg, text_width

SVG = "{http://www.w3.org/2000/svg}"
ATTENTION = [
    Span("attention side", name, start, end) for name, start, end in (
        ("attention, router, head", 0, 900), ("route", 900, 905), ("pack", 905, 960),
        ("put", 960, 990), ("wait", 990, 1900), ("combine", 1900, 1950),
        ("attention, router, head", 1950, 2600),
    )
]
SERVERS = [
    Span(f"server-{i}", name, 990 + 10 * i + start, 990 + 10 * i + end)
    for i in range(3) for name, start, end in (("trip", 0, 60), ("experts", 60, 700),
                                               ("trip", 700, 760))
]


def parse(svg: str) -> ET.Element:
    root = ET.fromstring(svg)
    assert root.tag == SVG + "svg"
    return root


def boxes(root: ET.Element) -> list[tuple[str, float, float, float, float]]:
    """(text, left, top, right, bottom) of every text, by the width the picture reckons with."""
    found = []
    for element in root.iter(SVG + "text"):
        content = element.text or ""
        size = float(element.get("font-size", 0))
        width = text_width(content, int(size))
        x, y = float(element.get("x", 0)), float(element.get("y", 0))
        left = x - {"start": 0, "middle": width / 2, "end": width}[element.get("text-anchor", "")]
        found.append((content, left, y - 0.8 * size, left + width, y + 0.2 * size))
    return found


def check(svg: str) -> list[str]:
    """No text leaves the picture, none lies on another. Returns the texts."""
    root = parse(svg)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    found = boxes(root)
    for content, left, top, right, bottom in found:
        assert left >= 0 and right <= width, f"{content!r} leaves the picture sideways"
        assert top >= 0 and bottom <= height, f"{content!r} leaves the picture"
    for a, b in itertools.combinations(found, 2):
        apart = a[3] <= b[1] or b[3] <= a[1] or a[4] <= b[2] or b[4] <= a[2]
        assert apart, f"{a[0]!r} lies on {b[0]!r}"
    return [content for content, *_ in found]


def test_a_decode_step(tmp_path):
    path = tmp_path / "step.svg"
    draw_step(path, [*ATTENTION, *SERVERS], "One decode step")
    texts = check(path.read_text())
    assert {"One decode step", "attention side", "server-0", "server-2", "experts"} <= set(texts)
    assert "share of the step" in texts and any(text.endswith(" %") for text in texts)


def test_every_span_is_drawn_in_place_and_to_scale():
    root = parse(step_svg([Span("a", "x", 0, 250), Span("a", "y", 750, 1000)], "t"))
    hints: dict[str | None, ET.Element] = {}
    for rectangle in root.iter(SVG + "rect"):
        for hint in rectangle.iter(SVG + "title"):
            hints.setdefault(hint.text, rectangle)  # the lane comes before the bar of shares
    first, second = hints["x: 250.0 us"], hints["y: 250.0 us"]
    assert float(first.get("width", 0)) == pytest.approx(float(second.get("width", 0)))
    assert first.get("fill") != second.get("fill")
    gap = float(second.get("x", 0)) - float(first.get("x", 0)) - float(first.get("width", 0))
    assert gap == pytest.approx(2 * float(first.get("width", 0)), rel=1e-3)
    right = float(second.get("x", 0)) + float(second.get("width", 0))
    assert right <= WIDTH


def test_shares_add_up_to_the_whole():
    spans = [Span("a", "x", 0, 750), Span("a", "y", 750, 1000), Span("b", "x", 0, 5)]
    texts = check(step_svg(spans, "t"))
    assert "75 %" in texts and "25 %" in texts and "a: 1000 us in all" in texts


@pytest.mark.parametrize("length", [30, 80, 400])
def test_long_names(length):
    """Names are whatever a user called the servers; none may cover another or leave the picture."""
    spans = [
        *ATTENTION,
        *(Span(f"{'server of a machine with a long name ' * 20}"[:length] + f" {i}", "experts",
               100 * i, 100 * i + 90) for i in range(4)),
    ]
    check(step_svg(spans, "A title " * 40))


def test_many_stages_with_long_names():
    check(step_svg([
        Span("attention side", f"a stage whose name is rather long, number {i}", 10 * i, 10 * i + 9)
        for i in range(12)
    ], "t"))


@pytest.mark.parametrize("spans", [
    [], [Span("a", "x", 0, 0)], [Span("a", "x", 0, 0), Span("b", "y", 0, 0)],
    [Span("a", "x", 0, 1e-9)], [Span("a", "x", 5, 5)],
], ids=["none", "empty", "two empty", "tiny", "later"])
def test_with_next_to_nothing_to_show(spans):
    check(step_svg(spans, "nothing"))


@pytest.mark.parametrize("end", [0.004, 0.9, 1, 7, 10, 99.9, 1234, 86_400_000_000.0])
def test_axis_of_any_length(end):
    texts = check(step_svg([Span("a", "x", 0, end)], "t"))
    assert "0 us" in texts


def test_names_are_escaped():
    nasty = "<script>alert('1') & \"2\"</script>"
    root = parse(step_svg([Span(nasty, nasty, 0, 10)], nasty))
    assert not list(root.iter(SVG + "script"))
    assert nasty in {element.text for element in root.iter(SVG + "text")}


def test_a_thousand_tiny_spans_make_a_small_picture():
    """Neighbours of one stage that no eye can tell apart are drawn as one."""
    spans = [Span("a", "x", i, i + 1) for i in range(100_000)]
    svg = step_svg(spans, "t")
    check(svg)
    assert len(svg) < 20_000
