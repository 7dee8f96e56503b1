"""The registry's page in a real browser, with real servers and clients behind it.

--screenshots FOLDER keeps what it looked like.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest

from expertwire import Client, Registry, Server
from expertwire.page import serve_page
from tests.system.cluster import TOKEN, ScaledExperts, batch, model_facts

MODEL = model_facts(num_experts=24, num_layers=6, hidden_size=32, top_k=2, name="<b>model</b>")
HOSTILE = "<img src=x onerror=alert(1)>"
SHARES = (range(10), range(8, 16), range(16, 24))


@pytest.fixture(scope="module")
def address():
    """A registry with three servers, and two clients that send without a pause to speak of."""
    stop = threading.Event()

    def send(client, num_tokens):
        seed = 0
        while not stop.wait(0.02):
            seed += 1
            client.moe(seed % 6, *batch(num_tokens, MODEL, seed=seed % 50))

    with contextlib.ExitStack() as stack:
        registry = stack.enter_context(Registry(token=TOKEN))
        for i, share in enumerate(SHARES):
            server = Server(ScaledExperts(share), MODEL, registry, token=TOKEN,
                            name=HOSTILE if i == 2 else f"server-{i}")
            stack.enter_context(server).wait_registered(10)
        threads = []
        for name, tokens in (("attention-0", 8), ("attention-1", 24)):
            client = stack.enter_context(Client(registry, token=TOKEN, name=name))
            client.wait_ready(10)
            threads.append(threading.Thread(target=send, args=(client, tokens)))
            threads[-1].start()
        try:
            yield stack.enter_context(serve_page(registry, "127.0.0.1:0")).address
        finally:
            stop.set()
            for thread in threads:
                thread.join(10)


@pytest.fixture
def keep(pytestconfig, tmp_path):
    """keep(seen, name): a screenshot of the whole page; its bytes."""
    folder = Path(pytestconfig.getoption("--screenshots") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return lambda seen, name: seen.page.screenshot(path=folder / f"{name}.png", full_page=True)


def shade(seen, selector):
    """Brightness of an element's background, 0 to 255."""
    color = seen.page.evaluate(
        "(s) => getComputedStyle(document.querySelector(s)).backgroundColor", selector)
    return sum(int(part) for part in color.strip("rgb()").split(",")[:3]) / 3


def test_the_live_picture(address, see, keep):
    seen = see(address)
    seen.open()
    seen.wait_looks(3)
    tiles = dict(reversed(tile.splitlines()) for tile in
                 seen.page.locator(".tile").all_inner_texts())
    assert tiles["servers"] == "3" and tiles["clients"] == "2" and tiles["errors"] == "0"
    assert tiles["rows /s"] [0] in "123456789" and "B" in tiles["to servers /s"]
    assert "epoch" in seen.text("#state") and "24 experts" in seen.text("#model")
    assert seen.page.locator("#servers article").count() == 3
    assert seen.page.locator("#servers .spark").count() == 3, "a line each after two reports"
    assert "experts 8\u201315" in seen.text("#servers")
    stages = seen.text("#stages")
    assert all(stage in stages for stage in ("route", "pack", "put", "wait", "combine", "gather"))
    assert "attention-1" in seen.text("#clients")
    keep(seen, "light")


def test_flows_join_every_client_with_every_server(address, see):
    seen = see(address)
    seen.open()
    seen.wait_looks(2)
    ribbons = seen.page.locator("#flows path.ribbon")
    assert ribbons.count() == 2 * 3
    widths = [float(r.get_attribute("stroke-width")) for r in ribbons.all()]
    # Ribbons are client by client; the second sends three times as many rows.
    assert sum(widths[3:]) > 1.5 * sum(widths[:3]), widths
    title = ribbons.first.locator("title").text_content()
    assert "attention-0 → server-0" in title and "p99" in title


def test_the_heat_map_shows_every_expert_of_every_layer(address, see):
    seen = see(address)
    seen.open()
    seen.wait_looks(2)
    box = seen.page.locator("#heat").bounding_box()
    shades = seen.page.evaluate("""() => {
      const canvas = document.getElementById("heat"), found = new Set();
      const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      for (let i = 0; i < data.length; i += 4) found.add(data.slice(i, i + 3).join());
      return found.size;
    }""")
    assert shades > 24, "it is not one colour"
    seen.page.mouse.move(box["x"] + 34 + 3, box["y"] + 5)
    seen.page.wait_for_selector("#heat-at:not(:empty)", timeout=10_000)
    words = seen.text("#heat-at")
    assert words.startswith("layer 0, expert 0: ") and "held by server-0" in words
    label = seen.page.get_attribute("#heat", "aria-label")
    assert label.startswith("Busiest: layer ") and "expert" in label


def test_names_are_text_and_nothing_comes_from_elsewhere(address, see):
    """Names are chosen by whoever has the token; they must not become markup."""
    seen = see(address)
    dialogs = []
    seen.page.on("dialog", lambda dialog: dialogs.append(dialog) or dialog.dismiss())
    seen.open()
    seen.wait_looks(1)
    assert HOSTILE in seen.text("#servers") and "<b>model</b>" in seen.text("#model")
    assert seen.page.locator("main img").count() == 0 and seen.page.locator("#model b").count() == 0
    assert not dialogs and not seen.problems, seen.problems
    assert {url.split("/")[2] for url in seen.requests} == {address}
    assert TOKEN.decode() not in seen.page.content()


def test_injected_scripts_do_not_run(address, see):
    seen = see(address)
    seen.open()
    seen.page.evaluate("""() => {
      const script = document.createElement("script");
      script.textContent = "document.title = 'taken'";
      document.head.append(script);
    }""")
    assert seen.page.title() == "expertwire"
    assert any("Content Security Policy" in problem for problem in seen.problems)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 768, 1280, 2200])
def test_readable_in_light_and_dark_at_every_width(address, see, keep, scheme, width):
    seen = see(address, width=width, scheme=scheme)
    seen.open()
    seen.wait_looks(1)
    assert seen.page.evaluate("() => document.documentElement.scrollWidth") <= width
    assert (shade(seen, "body") < 60) == (scheme == "dark")
    clipped = seen.page.evaluate("""() => [...document.querySelectorAll(
      ".tile b, .server dd, .stage span, h1, h2")].filter(
      (e) => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== "inline").map(
      (e) => e.textContent)""")
    assert clipped == [], "text that sticks out of its box"
    keep(seen, f"{scheme}-{width}")


def test_it_says_when_the_registry_is_gone_and_goes_on_when_it_is_back(see, keep):
    registry = Registry(token=TOKEN).start()
    with serve_page(registry, "127.0.0.1:0") as web:
        seen = see(web.address)
        seen.open()
        assert "No server yet" in seen.text("#servers") and "no model yet" in seen.text("#model")
        assert "No server yet" in seen.text("#heat-note")
        assert "expertwire serve MODEL" in seen.text("#servers")
        keep(seen, "empty")
        registry.close()
        seen.page.wait_for_selector("body.away", timeout=30_000)
        assert "does not answer" in seen.text("#state")
        keep(seen, "away")
