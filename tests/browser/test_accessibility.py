"""axe finds no serious fault in any view, in both themes, at both widths. Contrasts of colours are among its rules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from accessibility import faults
from browser_pages import THEMES, WIDTHS, OpenPage
from playwright.sync_api import Page, expect
from server_process import Server


def empty_chat(open_view: Callable[[str], Page]) -> Page:
    page = open_view("chat")
    expect(page.locator("#view-chat")).to_be_visible()
    return page


def question_for_a_key(open_view: Callable[[str], Page]) -> Page:
    page = open_view("chat")
    page.get_by_role("button", name="API key").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    return page


def live(open_view: Callable[[str], Page]) -> Page:
    page = open_view("live")
    expect(page.locator("#view-live")).to_be_visible()
    return page


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("state", [empty_chat, question_for_a_key, live], ids=lambda state: state.__name__)
def test_axe_finds_no_serious_fault(
    open_page: OpenPage,
    noop_server: Server,
    state: Callable[[Callable[[str], Page]], Page],
    width: int,
    theme: str,
) -> None:
    found = faults(state(lambda view: open_page(noop_server, f"/#{view}", width=width, theme=theme)))
    assert not found, "\n".join(found)
