"""The faults that axe finds in a page."""

from __future__ import annotations

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

SERIOUS = {"serious", "critical"}


def faults(page: Page) -> list[str]:
    return checked(page)[1]


def checked(page: Page) -> tuple[str, list[str]]:
    """The version of axe, and the serious faults."""
    response = Axe().run(page).response
    found = response["violations"]
    return response["testEngine"]["version"], [
        f"{fault['impact']}: {fault['id']} at {node['target']}: {node.get('failureSummary', '')}"
        for fault in found
        if fault["impact"] in SERIOUS
        for node in fault["nodes"]
    ]
