"""The page around its views: tabs, the keyboard, the API key, widths, themes."""

from __future__ import annotations

import re

from browser_pages import ADMIN, OpenPage
from playwright.sync_api import expect
from server_process import Server


def test_arrow_keys_move_between_the_tabs(open_page: OpenPage, noop_server: Server) -> None:
    page = open_page(noop_server)
    chat, live = page.get_by_role("tab", name="Chat"), page.get_by_role("tab", name="Live")
    expect(chat).to_have_attribute("aria-selected", "true")
    chat.focus()
    for key, selected, other in (
        ("ArrowRight", live, chat),
        ("ArrowRight", chat, live),
        ("End", live, chat),
        ("Home", chat, live),
        ("ArrowLeft", live, chat),
    ):
        page.keyboard.press(key)
        expect(selected).to_be_focused()
        expect(selected).to_have_attribute("aria-selected", "true")
        expect(selected).to_have_attribute("tabindex", "0")
        expect(other).to_have_attribute("aria-selected", "false")
        expect(other).to_have_attribute("tabindex", "-1")
    expect(page).to_have_title("Live · weft")
    assert page.url.endswith("#live")
    expect(page.locator("#view-chat")).to_be_hidden()


def test_a_key_that_is_entered_is_sent_and_kept_in_the_tab_only(
    open_page: OpenPage, keyed_server: Server
) -> None:
    page = open_page(keyed_server, expected=["401"])
    page.get_by_role("button", name="API key").click()
    dialog = page.get_by_role("dialog", name="API key")
    dialog.get_by_label("Key").fill(ADMIN)
    page.keyboard.press("Enter")
    expect(dialog).to_have_count(0)
    with page.expect_request("**/live/info") as asked:
        page.get_by_role("tab", name="Live").click()
    assert asked.value.headers["authorization"] == f"Bearer {ADMIN}"
    assert ADMIN not in page.url
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]


def test_the_question_for_a_key_closes_with_escape_and_gives_the_focus_back(
    open_page: OpenPage, noop_server: Server
) -> None:
    page = open_page(noop_server)
    opener = page.get_by_role("button", name="API key")
    opener.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="API key")
    expect(dialog.get_by_label("Key")).to_be_focused()
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(opener).to_be_focused()


def test_the_first_tab_stop_skips_the_header_and_keeps_the_view(
    open_page: OpenPage, noop_server: Server
) -> None:
    page = open_page(noop_server, "/#live")
    expect(page.get_by_role("tab", name="Live")).to_have_attribute("aria-selected", "true")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("main")).to_be_focused()
    expect(page).to_have_url(re.compile("#live$"))  # the page restores it when it gets the event
    page.reload()
    expect(page.get_by_role("tab", name="Live")).to_have_attribute("aria-selected", "true")
