"""A browser. These tests run when one is named: `pytest tests/browser --chromium PATH`."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest


def pytest_ignore_collect(collection_path, config: pytest.Config) -> bool | None:
    """Without --chromium they are no part of the suite; with it, what is missing is a failure."""
    return True if not config.getoption("--chromium") else None


@pytest.fixture(scope="session")
def browser(pytestconfig: pytest.Config) -> Iterator:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # In a container there is often no user namespace for the sandbox; only pages of this
        # test are opened.
        made = playwright.chromium.launch(
            executable_path=pytestconfig.getoption("--chromium"), args=["--no-sandbox"],
        )
        yield made
        made.close()


class Seen:
    """A page, and what went wrong in it or went elsewhere."""

    def __init__(self, page, address: str):
        self.page = page
        self.address = address
        self.problems: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.problems.append(message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def open(self) -> None:
        self.page.goto(f"http://{self.address}/")
        self.wait_looks(1)

    def looks(self) -> int:
        return int(self.page.evaluate("() => document.body.dataset.looks || '0'"))

    def wait_looks(self, more: int) -> None:
        """Until the page has drawn `more` pictures. Its policy bars wait_for_function's eval."""
        goal, deadline = self.looks() + more, time.monotonic() + 60
        while self.looks() < goal:
            assert time.monotonic() < deadline, f"{self.looks()} of {goal} looks: {self.problems}"
            self.page.wait_for_timeout(50)

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)


@pytest.fixture
def see(browser) -> Iterator:
    """see(address, width, height, scheme): a page in a window of its own."""
    contexts = []

    def make(address: str, width: int = 1280, height: int = 900, scheme: str = "light") -> Seen:
        context = browser.new_context(viewport={"width": width, "height": height},
                                      color_scheme=scheme)
        contexts.append(context)
        return Seen(context.new_page(), address)

    yield make
    for context in contexts:
        context.close()
