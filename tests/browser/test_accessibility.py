"""Every view fits windows of 360 and 1,920 pixels, and axe finds no serious fault in it, such as a low contrast."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from accessibility import checked
from browser_pages import HEIGHTS, THEMES, WIDTHS, OpenPage
from playwright.sync_api import Page, expect
from server_process import Server


def empty_chat(open_view: Callable[[str], Page]) -> Page:
    page = open_view("/#chat")
    expect(page.locator("#view-chat")).to_be_visible()
    return page


def question_for_a_key(open_view: Callable[[str], Page]) -> Page:
    page = open_view("/#chat")
    page.get_by_role("button", name="API key").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    return page


def live(open_view: Callable[[str], Page]) -> Page:
    page = open_view("/#live")
    expect(page.locator("#view-live")).to_be_visible()
    return page


def docs(open_view: Callable[[str], Page]) -> Page:
    page = open_view("/docs")
    expect(page.get_by_role("main")).to_be_visible()
    return page


NO_FAULT = "no serious fault for axe, at 360 and 1,920 pixels, light and dark"
STATES = (empty_chat, question_for_a_key, live, docs)


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_a_view_fits_its_window_and_axe_finds_no_serious_fault(
    open_page: OpenPage,
    noop_server: Server,
    figures: dict[str, str],
    state: Callable[[Callable[[str], Page]], Page],
) -> None:
    page = state(lambda path: open_page(noop_server, path))
    for width, theme in product(WIDTHS, THEMES):
        page.set_viewport_size({"width": width, "height": HEIGHTS[width]})
        page.emulate_media(color_scheme=theme)
        content, window = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert content <= window == width
        version, found = checked(page)
        assert not found, "\n".join([f"{width} pixels, {theme}:", *found])
    figures["axe-core"] = version
    clean = figures.get(NO_FAULT, "")
    figures[NO_FAULT] = f"{clean}, {state.__name__}".removeprefix(", ").replace("_", " ")
