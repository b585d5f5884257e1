"""What the chat says and keeps when a server refuses, ends, or wants a key."""

from __future__ import annotations

import re
import signal
from contextlib import suppress
from pathlib import Path
from threading import Thread

import httpx
import pytest
from browser_pages import USER, OpenPage
from chat_page import answer, ask, asked, message_field, set_fields
from playwright.sync_api import Page, expect
from server_process import SLOW, Server, api_key, running_server, wait_for

LONG = {"max_tokens": 4000, "ignore_eos": True, "stream": True}


def error(page: Page) -> str:
    box = page.locator(".answer-error")
    expect(box).to_be_visible()
    return " ".join(box.locator("p").all_inner_texts())


def test_a_key_is_asked_for_when_the_server_needs_one_and_stays_in_the_tab(
    open_page: OpenPage, keyed_server: Server
) -> None:
    page = open_page(keyed_server, expected=["401"], permissions=["clipboard-read", "clipboard-write"])
    set_fields(page, max_tokens="4")
    message_field(page).fill("Hello")
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="API key")
    expect(dialog).to_contain_text("This server needs an API key.")
    dialog.get_by_label("Key").fill("wrong")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("The server does not accept this API key.")
    dialog.get_by_label("Key").fill(USER)
    page.keyboard.press("Enter")
    expect(answer(page).locator(".figures")).to_contain_text("4 tokens")
    for name in ("Copy the request as curl", "Copy the request as Python"):
        page.get_by_role("button", name=name).click()
        copied = page.evaluate("navigator.clipboard.readText()")
        assert "WEFT_API_KEY" in copied and USER not in copied
    stored = page.evaluate(
        """async () => {
          const { ConversationStore } = await import("/page/chat_store.js");
          const store = new ConversationStore({ onChange() {}, onDelete() {} });
          return JSON.stringify([await store.read((await store.list())[0].id), { ...localStorage }, document.cookie]);
        }"""
    )
    assert "Hello" in stored and USER not in stored
    assert USER not in page.url


@pytest.mark.long
def test_without_a_key_the_question_stays_and_can_be_asked_again(
    open_page: OpenPage, keyed_server: Server
) -> None:
    page = open_page(keyed_server, expected=["401"])
    set_fields(page, max_tokens="2")
    message_field(page).fill("Hello")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="API key")).to_be_visible()
    page.keyboard.press("Escape")
    assert error(page).startswith("The API key is missing or wrong")
    page.get_by_role("button", name="Try again").click()
    page.get_by_role("dialog", name="API key").get_by_label("Key").fill(USER)
    page.keyboard.press("Enter")
    expect(page.locator(".figures")).to_contain_text("2 tokens")
    expect(page.locator(".versions:visible")).to_have_count(0)


@pytest.mark.long
def test_a_refused_question_says_when_to_ask_again(open_page: OpenPage, default_model_path: Path) -> None:
    keys = [api_key(USER, requests_per_minute=1)]
    with running_server(
        default_model_path, api_keys=keys, headers={"Authorization": f"Bearer {USER}"}
    ) as server:
        assert server.chat().status_code == 200
        page = open_page(server, expected=["401", "429"])
        page.evaluate("(key) => sessionStorage.setItem('weft.key', key)", USER)
        asked(page, "Hello")
        assert re.search(r"\. Ask again in \d+ seconds?\.$", error(page)), error(page)
        page.close()


@pytest.mark.long
def test_a_conversation_that_is_too_long_for_the_model_says_what_to_do(
    open_page: OpenPage, noop_server: Server
) -> None:
    page = open_page(noop_server, expected=["400"])
    asked(page, "word " * 10_000)
    assert "8192" in error(page)
    assert error(page).endswith(
        "The conversation is too long for the model. Start a new chat, or edit an earlier message."
    )


@pytest.mark.long
def test_a_server_that_shuts_down_is_a_sentence(open_page: OpenPage, default_model_path: Path) -> None:
    with running_server(default_model_path, backend_options=SLOW) as server:
        page = open_page(server, expected=["503", "ERR_"])
        expect(message_field(page)).to_be_visible()

        def long_request() -> None:
            with suppress(httpx.HTTPError):  # the server ends it
                server.chat(**LONG)

        open_request = Thread(target=long_request)
        open_request.start()
        wait_for(lambda: server.metric("num_requests_running") == 1)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.client.get("/ready").status_code == 503)
        asked(page, "Hello")
        assert error(page).startswith("The server is shutting down; send the request to another server.")
        page.close()
        server.process.send_signal(signal.SIGTERM)
        open_request.join(60)


def test_a_connection_that_breaks_leaves_the_partial_answer(
    open_page: OpenPage, default_model_path: Path
) -> None:
    with running_server(default_model_path, backend_options=SLOW) as server:
        page = open_page(server, expected=["ERR_"])
        set_fields(page, ignore_eos="true")
        ask(page, "Hello")
        prose = page.locator(".message.assistant > .prose")
        expect(prose).to_have_text(re.compile(r"\S{3}"))
        arrived = prose.inner_text()[:3]
        server.process.kill()
        assert error(page).startswith("The connection")
        assert prose.inner_text().startswith(arrived)
        expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
        page.get_by_role("button", name="Try again").click()
        expect(page.locator(".answer-error")).to_contain_text("The server does not answer. Is it running?")
        expect(page.locator(".versions:visible")).to_contain_text("2 / 2")
        page.get_by_role("button", name="Earlier version").first.click()
        assert prose.inner_text().startswith(arrived)
        page.close()
