"""The browser, and servers for it. `make test-browser` runs these tests; they need Playwright and a chromium.

    def test_something(open_page, noop_server):
        page = open_page(noop_server, width=360, theme="dark")      # a Playwright page, in a context of its own
        page.get_by_role("tab", name="Live").click()

A test fails if its pages report an error, break their content security policy, or request anything from another host.
A test in which the server refuses something says so: `open_page(server, expected=["401"])`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "server"))

from browser_pages import ADMIN, CHROMIUM_ARGUMENTS, HEIGHTS, USER, OpenPage, ScriptedServer, Watch
from playwright.sync_api import Browser, Page, expect, sync_playwright
from server_process import SLOW, Server, api_key, running_server

SCRIPTED = Path(__file__).parents[1] / "scripted"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: left out of the short form, which CI runs")


@pytest.fixture(scope="session")
def figures() -> Iterator[dict[str, str]]:
    """What the tests measured, for the table that `make test-browser` writes."""
    found: dict[str, str] = {}
    yield found
    if path := os.environ.get("WEFT_TEST_FIGURES"):
        Path(path).write_text(json.dumps(found), "utf-8")


@pytest.fixture(scope="session")
def browser(figures: dict[str, str]) -> Iterator[Browser]:
    path = os.environ.get("CHROMIUM")
    assert path, "CHROMIUM must be the path of the browser; `make test-browser` finds it"
    expect.set_options(timeout=60_000)  # a busy machine is not a fault of the page
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(CHROMIUM_ARGUMENTS))
        figures["chromium"] = browser.version
        figures["Playwright"] = version("playwright")
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """`open_page(server, path="/", width=1280, theme="light", expected=(), **context)`: a page in a new context.

    `expected`: regular expressions for console errors that the test causes on purpose. `context`: what Playwright's
    `new_context` takes, such as `bypass_csp=True` for scripts that a test puts into the page."""
    watches = []
    with ExitStack() as stack:

        def opened(
            server: Server,
            path: str = "/",
            *,
            width: int = 1280,
            theme: str = "light",
            expected: Sequence[str] = (),
            **context: Any,
        ) -> Page:
            given = browser.new_context(
                base_url=server.url,
                viewport={"width": width, "height": HEIGHTS[width]},
                color_scheme=theme,
                reduced_motion="reduce",
                **context,
            )
            stack.callback(given.close)
            watch = Watch(f"127.0.0.1:{server.port}", expected)
            watches.append(watch)
            watch.attach(given)
            page = given.new_page()
            page.set_default_timeout(60_000)
            stack.callback(lambda: page.is_closed() or page.evaluate("1"))  # receives the last events
            page.goto(path)
            return page

        yield opened
    for watch in watches:
        watch.check()


@pytest.fixture(scope="session")
def real_server(default_model_path: Path) -> Iterator[Server]:
    """The default model, without keys."""
    options = {"checkpoint": str(default_model_path), "max_context": 2048}
    with running_server(default_model_path, backend="cpu", backend_options=options) as server:
        yield server


@pytest.fixture(scope="session")
def noop_server(default_model_path: Path) -> Iterator[Server]:
    """The noop backend, 10 ms a step: text without meaning, in answers that can run for more than a minute."""
    with running_server(default_model_path, backend_options=SLOW) as server:
        yield server


@pytest.fixture(scope="session")
def keyed_server(default_model_path: Path) -> Iterator[Server]:
    """The noop backend with the keys `ADMIN` and `USER`. Its client has the admin key."""
    settings = {
        "backend_options": SLOW,
        "api_keys": [api_key(ADMIN, admin=True), api_key(USER)],
        "headers": {"Authorization": f"Bearer {ADMIN}"},
    }
    with running_server(default_model_path, **settings) as server:
        yield server


@pytest.fixture(scope="session")
def scripted_server(
    default_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ScriptedServer]:
    """`scripted_server([rule, ...], **settings)`: a server whose model answers by rules (`tests/scripted`). One server
    for each list of rules."""
    running: dict[str, Server] = {}
    with ExitStack() as stack:

        def started(rules: Sequence[dict[str, Any]], **settings: Any) -> Server:
            name = json.dumps([list(rules), settings], sort_keys=True, default=str)
            if name not in running:
                script = tmp_path_factory.mktemp("scripted") / "script.json"
                script.write_text(json.dumps({"rules": list(rules)}), "utf-8")
                given = {
                    "backend": "scripted",
                    "backend_options": {"checkpoint": str(default_model_path)},
                    "python_path": [str(SCRIPTED)],
                    "environment": {"WEFT_TEST_SCRIPT": str(script)},
                    **settings,
                }
                running[name] = stack.enter_context(running_server(default_model_path, **given))
            return running[name]

        yield started
