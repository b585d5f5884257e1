"""A chat with everything in it fits its window, and axe finds no serious fault."""

from __future__ import annotations

import pytest
from accessibility import checked
from browser_pages import HEIGHTS, OpenPage, ScriptedServer
from chat_page import RULES, TEMPLATE, asked, open_settings, set_fields
from playwright.sync_api import Page, expect
from server_process import Server

SHORT, OTHERS = [(1920, "light"), (360, "dark")], [(1920, "dark"), (360, "light")]
NO_FAULT = "no serious fault for axe in a chat with code, a table, thoughts, tokens, a call and an error"


@pytest.fixture(scope="module")
def full_chat_server(scripted_server: ScriptedServer, tmp_path_factory: pytest.TempPathFactory) -> Server:
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    return scripted_server(RULES, chat_template=str(template))


def full_chat(page: Page) -> None:
    """Every kind of message, and both panes where there is room."""
    open_settings(page).get_by_role("button", name="Insert an example").click()
    asked(page, "Something hostile")
    asked(page, "Please think").locator("summary").click()
    page.get_by_role("button", name="Edit and ask again").last.click()
    page.keyboard.press("Enter")
    set_fields(page, deadline="0")
    asked(page, "the first question")
    set_fields(page, deadline="", logprobs="true", top_logprobs="2")
    asked(page, "the first question").locator(".token").first.hover()
    asked(page, "How is the weather?")
    expect(page.get_by_label("Result of get_weather")).to_be_visible()
    expect(page.locator(".answer-error:visible")).to_have_count(1)


def check(page: Page, width: int, theme: str) -> str:
    content, window = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert content <= window == width
    for one in page.locator(".log, .pane:visible > :last-child").all():
        content, room = one.evaluate("(one) => [one.scrollWidth, one.clientWidth]")
        assert content <= room
    version, found = checked(page)
    assert not found, "\n".join([f"{width} pixels, {theme}:", *found])
    return version


@pytest.mark.parametrize(
    "looks", [SHORT, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["short", "others"]
)
def test_a_full_chat_fits_its_window_and_axe_finds_no_serious_fault(
    open_page: OpenPage, full_chat_server: Server, figures: dict[str, str], looks: list[tuple[int, str]]
) -> None:
    page = open_page(full_chat_server, width=1920, expected=["504"])
    full_chat(page)
    for width, theme in looks:
        page.set_viewport_size({"width": width, "height": HEIGHTS[width]})
        page.emulate_media(color_scheme=theme)
        check(page, width, theme)
    for pane in ("Settings", "Conversations"):
        page.get_by_role("button", name=pane, exact=True).click()
        expect(page.get_by_role("complementary", name=pane)).to_be_visible()
        check(page, *looks[-1])
        page.keyboard.press("Escape")
    figures[NO_FAULT] = "360 and 1,920 pixels, light and dark"


@pytest.mark.long
def test_the_cost_of_a_long_answer_is_reported(
    open_page: OpenPage, full_chat_server: Server, figures: dict[str, str]
) -> None:
    """Scripting time for each token of 20,000 characters of Markdown, in the browser."""
    page = open_page(full_chat_server)
    found = page.evaluate(
        """async () => {
          const { MarkdownView } = await import("/page/chat_markdown.js");
          const text = "## A title\\n\\nSome *words* with `code` and [a link](https://example.com/).\\n\\n- one\\n- two\\n\\n```\\nx = 1\\n```\\n\\n| a | b |\\n|---|---|\\n| 1 | 2 |\\n\\n";
          const whole = text.repeat(Math.ceil(20000 / text.length));
          const view = new MarkdownView(document.createElement("div"));
          const times = [];
          const pieces = whole.match(/[^]{1,4}/g);
          for (let at = 0; at < pieces.length; at += 1000) {
            const start = performance.now();
            for (const piece of pieces.slice(at, at + 1000)) view.add(piece);
            times.push(1000 * (performance.now() - start) / pieces.slice(at, at + 1000).length);
          }
          return { first: times[0], last: times.at(-1), tokens: pieces.length };
        }"""
    )
    figures["Markdown, scripting for each token"] = (
        f"{found['first']:.0f} µs in the first 1,000 tokens of an answer, {found['last']:.0f} µs in the last of {found['tokens']:,}"
    )
