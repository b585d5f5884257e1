"""Takes the pictures of the guide: `make screenshots`. A real server with the default model works under load meanwhile."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "server"))

import httpx
from browser_pages import CHROMIUM_ARGUMENTS
from chat_page import asked, set_fields
from playwright.sync_api import Browser, Page, expect, sync_playwright
from server_process import Server, running_server, wait_for
from shown_replay import shown

from weft.loading.pull import pull

FOLDER = Path(__file__).parents[2] / "docs" / "guide"
WINDOW = {"width": 1280, "height": 800}
NUM_CLIENTS = 20
ENGINE: dict[str, Any] = {
    "scheduler": {"max_running": 14, "policy": "adaptive", "max_chunk_tokens": 64},
    "cache": {"num_blocks": 230, "swap_blocks": 64},
}
"""Less memory than the clients need, so that requests wait and are preempted."""
SHARED = (
    "You help the crew of a lighthouse. Answer in plain words, and name the tide, the wind and the light. "
    * 4
)
QUESTIONS = (
    "Write a letter to the harbour about the fog of last night.",
    "List what the lamp needs before the winter.",
    "Tell the story of the keeper who counted waves.",
    "Explain to a child why the light turns.",
)


@contextmanager
def clients(server: Server) -> Iterator[None]:
    """Some clients ask one question after another, until the end of the `with` block."""
    has_ended = threading.Event()

    def ask(number: int) -> None:
        source = random.Random(number)
        with httpx.Client(base_url=server.url, timeout=300) as client:
            while not has_ended.is_set():
                prompt = (SHARED if source.random() < 0.7 else "") + source.choice(QUESTIONS)
                fields: dict[str, Any] = {
                    "prompt": prompt,
                    "max_tokens": source.randrange(60, 260),
                    "ignore_eos": True,
                    "stream": True,
                    "priority": source.choice(["low", "normal", "normal", "high"]),
                }
                if source.random() < 0.3:
                    fields["session_id"] = f"session-{source.randrange(3)}"
                if source.random() < 0.4:
                    fields["deadline"] = 120
                with client.stream("POST", "/v1/completions", json=fields) as response:
                    for _ in response.iter_bytes():
                        if has_ended.is_set():
                            return

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        has_ended.set()
        for thread in threads:
            thread.join()


def opened(browser: Browser, url: str, theme: str = "light") -> Page:
    context = browser.new_context(viewport=WINDOW, color_scheme=theme, reduced_motion="reduce")
    page = context.new_page()
    page.goto(url)
    return page


def take(page: Page, name: str) -> None:
    path = FOLDER / f"{name}.png"
    page.screenshot(path=path)
    print(f"{path.relative_to(FOLDER.parents[1])}: {path.stat().st_size // 1024} KB")


def take_chat(browser: Browser, server: Server) -> None:
    page = opened(browser, f"{server.url}/#chat")
    set_fields(page, temperature="0", max_tokens="160")
    asked(page, "What is the capital of Japan?")
    page.get_by_role("button", name="New chat").first.click()
    expect(asked(page, "Write a Python function that reverses a list.").locator("pre").first).to_contain_text(
        "def "
    )
    page.mouse.move(0, 0)
    page.locator(".pane.right > :last-child").evaluate("(one) => one.scrollTo(0, 0)")
    take(page, "chat")


def take_live(browser: Browser, server: Server) -> None:
    page, dark = (opened(browser, f"{server.url}/#live", theme) for theme in ("light", "dark"))
    with clients(server):
        page.wait_for_timeout(45_000)
        take(page, "live")
        decoding = dark.locator(".batch-row[data-state=decoding]").first
        decoding.locator(".name").click()
        expect(dark.get_by_role("complementary")).to_contain_text("first token")
        dark.wait_for_timeout(1000)
        take(dark, "live-request")


def take_replay(browser: Browser, log: Path) -> None:
    with shown(log) as server:
        wait_for(lambda: server.client.get("/live/info").json()["is_complete"], 600)
        number = server.client.get("/live/info").json()["num_frames"]
        page = opened(browser, server.url)
        page.get_by_role("slider", name="Frame").fill(str(number * 2 // 3))
        expect(page.locator(".position")).to_contain_text(f"{number:,}")
        page.get_by_role("slider", name="Frame").blur()
        page.wait_for_timeout(1000)
        take(page, "replay")


def main() -> None:
    model = pull("default")
    expect.set_options(timeout=120_000)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        log = Path(folder) / "engine.log"
        browser = playwright.chromium.launch(
            executable_path=os.environ["CHROMIUM"], args=list(CHROMIUM_ARGUMENTS)
        )
        options = {"checkpoint": str(model), "max_context": 2048}
        settings = {"engine": {**ENGINE, "log_path": str(log)}, "names": [Path(model).stem]}
        with running_server(model, backend="cpu", backend_options=options, **settings) as server:
            take_chat(browser, server)
            take_live(browser, server)
        take_replay(browser, log)
        browser.close()


if __name__ == "__main__":
    main()
