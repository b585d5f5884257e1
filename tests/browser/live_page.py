"""Steps in the live view that several tests take."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from playwright.sync_api import Locator, Page, expect
from server_process import MESSAGES, Server

LONG = {"max_tokens": 6000, "ignore_eos": True}


class Answer:
    """A streamed answer of the server."""

    def __init__(self, server: Server, **fields: Any) -> None:
        self.id = ""
        self.has_ended = threading.Event()
        self._client = httpx.Client(base_url=server.url, headers=server.client.headers, timeout=120)
        self._fields = {"messages": MESSAGES, "stream": True, **LONG, **fields}
        self._has_begun = threading.Event()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self._has_begun.wait(60)

    def _read(self) -> None:
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=self._fields) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        self.id = json.loads(line[6:]).get("id", "").removeprefix("chatcmpl-") or self.id
                        self._has_begun.set()
                    if self._is_closing.is_set():
                        return
        finally:
            self._has_begun.set()
            self.has_ended.set()

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join(60)
        self._client.close()


@contextmanager
def answers(server: Server, number: int = 1, **fields: Any) -> Iterator[list[Answer]]:
    running = [Answer(server, **fields) for _ in range(number)]
    try:
        yield running
    finally:
        for answer in running:
            answer.close()


def live(page: Page) -> Page:
    expect(page.locator(".chip")).to_have_text("Live")
    return page


def row(page: Page, name: str) -> Locator:
    return page.locator(f".batch-row[data-id='{name}']")
