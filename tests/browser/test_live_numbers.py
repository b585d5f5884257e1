"""The pure functions of the live view: what it computes from frames before it draws. They run in the browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from browser_pages import CHROMIUM_ARGUMENTS  # noqa: F401
from playwright.sync_api import Browser, Page
from server_process import Server

from weft.live import BLOCK_STATES, LiveEvent, LiveRequest, LiveStep
from weft.metrics import Histogram


@pytest.fixture(scope="module")
def modules(browser: Browser, noop_server: Server) -> Iterator[Page]:
    """A page that imports modules of the live view."""
    page = browser.new_page(base_url=noop_server.url)
    page.goto("/page/icon.svg")
    yield page
    page.close()
