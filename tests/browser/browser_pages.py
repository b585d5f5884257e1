"""What all tests in the browser share: sizes, keys, and the watch over what a page does."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from playwright.sync_api import BrowserContext, ConsoleMessage, Page, Request
from server_process import Server

WIDTHS = (360, 1920)
THEMES = ("light", "dark")
HEIGHTS = {360: 740, 1280: 800, 1920: 1080}
"""The height of a window by its width."""
ADMIN, USER = "admin-secret", "user-secret"
"""Keys of `keyed_server`. The name of a key is its secret."""
CHROMIUM_ARGUMENTS = (
    "--no-sandbox",  # chromium refuses to run as root with it
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-features=Translate,OptimizationHints,MediaRouter",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)

OpenPage = Callable[..., Page]
ScriptedServer = Callable[..., Server]


@dataclass
class Watch:
    """What the pages of one test did wrong."""

    host: str
    expected: Sequence[str] = ()
    """Regular expressions for errors that belong to the test."""
    errors: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def attach(self, context: BrowserContext) -> None:
        context.on("console", self._on_console)
        context.on("request", self._on_request)
        context.on("weberror", lambda found: self._add(f"uncaught: {found.error}"))

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self._add(f"{message.type}: {message.text} ({message.location.get('url', '')})")

    def _on_request(self, request: Request) -> None:
        url = urlsplit(request.url)
        if url.scheme not in ("data", "blob", "about") and url.netloc != self.host:
            self.foreign.append(request.url)

    def _add(self, text: str) -> None:
        if not any(re.search(pattern, text) for pattern in self.expected):
            self.errors.append(text)

    def check(self) -> None:
        assert not self.foreign, f"requests to other hosts: {self.foreign}"
        assert not self.errors, "\n".join(self.errors)
