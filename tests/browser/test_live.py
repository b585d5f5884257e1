"""The live view in a browser, on the frames of a real server."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from accessibility import checked
from browser_pages import ADMIN, HEIGHTS, THEMES, USER, WIDTHS, OpenPage
from live_page import LONG, answers, live, row
from playwright.sync_api import Page, expect
from server_process import MESSAGES, SLOW, Server, api_key, running_server, wait_for

NUM_ROWS = 256


def test_a_request_appears_runs_and_ends(open_page: OpenPage, noop_server: Server) -> None:
    page = live(open_page(noop_server, "/#live"))
    with answers(noop_server) as [answer]:
        expect(row(page, answer.id)).to_have_attribute("data-state", "decoding")
        chart = page.get_by_role("img", name="Time to first token")
        expect(chart).to_have_attribute("aria-label", re.compile(r"median \d"))
        row(page, answer.id).click()
        panel = page.get_by_role("complementary")
        expect(panel).to_contain_text(answer.id)
        expect(panel).to_contain_text("first token")
    expect(panel).to_contain_text("finished: cancelled")
    expect(panel.get_by_role("button", name="Cancel this request")).to_be_hidden()
    expect(page.locator(".ended li").first).to_contain_text(answer.id[:8])
    expect(row(page, answer.id)).to_have_attribute("data-state", "ended")
    noop_server.chat(max_tokens=3, ignore_eos=True)
    expect(page.locator(".ended li").first).to_contain_text("length")


def test_the_button_cancels_a_request_with_an_admin_key(open_page: OpenPage, keyed_server: Server) -> None:
    page = open_page(keyed_server, "/#live", expected=["401"])
    enter_key(page)
    live(page)
    with answers(keyed_server) as [answer]:
        row(page, answer.id).click()
        panel = page.get_by_role("complementary")
        expect(panel.locator(".facts")).to_contain_text(ADMIN)  # the name of the key
        expect(panel.get_by_role("button", name="Show its text")).to_be_hidden()
        panel.get_by_role("button", name="Cancel this request").click()
        expect(panel).to_contain_text("finished: cancelled")
        assert answer.has_ended.wait(60)


@contextmanager
def held_answers(server: Server, number: int, **fields: Any) -> Iterator[list[httpx.Response]]:
    """Requests with the key `USER` whose answers do not stream. The list gets the replies."""
    replies: list[httpx.Response] = []

    def ask() -> None:
        with httpx.Client(base_url=server.url, headers=bearer(USER), timeout=120) as client:
            replies.append(client.post("/v1/chat/completions", json={"messages": MESSAGES, **LONG, **fields}))

    threads = [threading.Thread(target=ask) for _ in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield replies
    finally:
        for one in server.client.get("/admin/requests").json()["data"]:
            server.client.delete(f"/admin/requests/{one['id']}")
        for thread in threads:
            thread.join(60)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def small_server(default_model_path: Path) -> Iterator[Server]:
    """Two keys and one row, so that the server holds requests back."""
    settings = {
        "api_keys": [api_key(ADMIN, admin=True), api_key(USER)],
        "engine": {"scheduler": {"max_running": 1}},
        "headers": bearer(ADMIN),
    }
    with running_server(default_model_path, backend_options=SLOW, **settings) as server:
        yield server


def enter_key(page: Page) -> None:
    page.get_by_role("dialog", name="API key").get_by_label("Key").fill(ADMIN)
    page.keyboard.press("Enter")


def test_a_held_request_shows_its_deadline_and_is_cancelled_with_the_keyboard(
    open_page: OpenPage, small_server: Server
) -> None:
    page = open_page(small_server, "/#live", expected=["401"])
    enter_key(page)
    live(page)
    with answers(small_server), held_answers(small_server, 1, n=12, deadline=500) as replies:
        group = page.locator(".queue .group", has_text="held by the server")
        expect(group).to_contain_text(USER)
        held = group.locator("xpath=following-sibling::tr[1]")
        expect(held).to_contain_text("in 8 min")
        held.get_by_role("button").focus()
        page.keyboard.press("Enter")
        panel = page.get_by_role("complementary")
        expect(panel.locator(".facts")).to_contain_text("held by the server until the engine has room")
        for text in (USER, "normal", "Answers held back", "in 8 min"):
            expect(panel.locator(".facts")).to_contain_text(text)
        cancel = panel.get_by_role("button", name="Cancel this request with all its answers")
        page.keyboard.press("Tab")  # the button that closes the panel
        page.keyboard.press("Tab")
        expect(cancel).to_be_focused()
        page.keyboard.press("Enter")
        wait_for(lambda: replies)
        assert replies[0].json()["error"]["code"] == "cancelled"
        expect(panel.locator(".facts")).to_contain_text("the server holds it no longer")
        expect(cancel).to_be_hidden()


def test_each_request_of_a_long_queue_can_be_opened(open_page: OpenPage, small_server: Server) -> None:
    page = open_page(small_server, "/#live", expected=["401"])
    enter_key(page)
    live(page)
    with answers(small_server), held_answers(small_server, 20, max_tokens=2):
        rows = page.locator(".queue tbody tr:not(.group):not([hidden])")
        expect(page.locator(".queue .figure")).to_contain_text(re.compile("in the engine · (19|20) held"))
        expect(rows).not_to_have_count(20)
        page.get_by_role("button", name="Show all").click()
        expect(rows).to_have_count(20)
        page.get_by_role("button", name="Show fewer").click()
        expect(rows).not_to_have_count(20)
        listed = small_server.client.get("/admin/requests").json()["data"]
        wanted = [one["id"] for one in listed if one["key"] == USER][-1]
        page.get_by_role("searchbox").fill(wanted[:20])
        expect(rows).to_have_count(1)
        rows.get_by_role("button").click()
        expect(page.get_by_role("complementary")).to_contain_text(wanted)
        page.get_by_role("searchbox").fill("no such id")
        expect(page.locator(".queue .empty")).to_contain_text("No request that waits")


def test_everything_is_reached_with_the_keyboard(open_page: OpenPage, noop_server: Server) -> None:
    page = live(open_page(noop_server, "/#live"))
    with answers(noop_server, 2) as running:
        rows = page.get_by_role("listbox", name="Rows of the batch")
        for answer in running:
            expect(row(page, answer.id)).to_have_attribute("data-state", "decoding")
        page.get_by_role("tab", name="Live").focus()
        reached = []
        for _ in range(14):
            page.keyboard.press("Tab")
            reached.append(
                page.evaluate("document.activeElement.ariaLabel ?? document.activeElement.textContent")
            )
        for name in ("Pause", "Rows of the batch", "Requests that wait"):
            assert name in reached
        assert any(name.startswith("Map of") for name in reached)
        assert (
            sum(name.startswith(("Step time:", "Tokens per second:", "Prefix hits:")) for name in reached)
            == 3
        )
        rows.focus()
        page.keyboard.press("ArrowDown")
        chosen = page.get_by_role("option", selected=True)
        expect(chosen).to_have_attribute("aria-posinset", "2")
        name = chosen.get_attribute("data-id")
        page.keyboard.press("Enter")
        panel = page.get_by_role("complementary")
        expect(panel.get_by_role("heading", level=2)).to_be_focused()
        expect(panel).to_contain_text(str(name))
        page.keyboard.press("Escape")
        expect(panel).to_be_hidden()
        expect(rows).to_be_focused()
        chart = page.get_by_role("img", name="Tokens per second")
        chart.focus()
        page.keyboard.press("Home")
        expect(chart).to_have_attribute("aria-label", re.compile("ago: generated"))
        rows.focus()
        page.keyboard.press("Enter")
        expect(panel.get_by_role("heading", level=2)).to_be_focused()
        for _ in range(2):  # the button that closes the panel, the one that cancels
            page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(panel).to_contain_text("finished: cancelled")


def test_a_pause_ends_the_stream_and_a_lost_server_is_asked_again(
    open_page: OpenPage, noop_server: Server
) -> None:
    page = live(open_page(noop_server, "/#live", expected=["503"]))
    page.get_by_role("button", name="Pause").click()
    expect(page.locator(".chip")).to_have_text("Paused")
    step = page.locator(".tiles dd").first.text_content()
    noop_server.chat()
    assert page.locator(".tiles dd").first.text_content() == step
    refusal = {"status": 503, "json": {"error": {"message": "The server is away."}}}
    page.route("**/live", lambda route: route.fulfill(**refusal))
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".live-notice")).to_contain_text("The server is away. Next attempt in 1 s.")
    page.unroute("**/live")
    live(page)
    expect(page.locator(".tiles dd").first).not_to_have_text(str(step))


def test_a_hidden_view_reads_no_frames(open_page: OpenPage, noop_server: Server) -> None:
    page = live(open_page(noop_server, "/#live"))
    with page.expect_event("requestfailed", lambda request: request.url.endswith("/live")):
        page.get_by_role("tab", name="Chat").click()
    with page.expect_request("**/live"):
        page.get_by_role("tab", name="Live").click()
    live(page)
    hide = "(state) => { Object.defineProperty(document, 'visibilityState', { value: state, configurable: true }); document.dispatchEvent(new Event('visibilitychange')); }"
    with page.expect_event("requestfailed", lambda request: request.url.endswith("/live")):
        page.evaluate(hide, "hidden")
    with page.expect_request("**/live"):
        page.evaluate(hide, "visible")


@pytest.mark.long
def test_a_silent_engine_is_shown_as_one(open_page: OpenPage, noop_server: Server) -> None:
    page = live(open_page(noop_server, "/#live"))
    os.kill(noop_server.engine_pid(), signal.SIGSTOP)
    try:
        expect(page.locator(".chip")).to_have_text("Engine is silent")
        expect(page.locator(".live-notice")).to_contain_text("does not answer")
    finally:
        os.kill(noop_server.engine_pid(), signal.SIGCONT)
    live(page)


@pytest.mark.long
def test_the_text_of_a_request_is_shown_if_the_server_allows_it(
    open_page: OpenPage, default_model_path: Path
) -> None:
    with running_server(default_model_path, backend_options=SLOW, show_prompts=True) as server:
        page = live(open_page(server, "/#live"))
        with answers(server) as [answer]:
            row(page, answer.id).click()
            page.get_by_role("button", name="Show its text").click()
            expect(page.locator(".texts")).to_contain_text(MESSAGES[0]["content"])
        page.close()


def test_a_busy_view_fits_its_window_and_axe_finds_no_serious_fault(
    open_page: OpenPage, noop_server: Server
) -> None:
    page = live(open_page(noop_server, "/#live"))
    with answers(noop_server, 3) as running:
        for is_open, width, theme in product((False, True), WIDTHS, THEMES):
            page.set_viewport_size({"width": width, "height": HEIGHTS[width]})
            page.emulate_media(color_scheme=theme)
            expect(row(page, running[0].id)).to_have_attribute("data-state", "decoding")
            if is_open and not page.get_by_role("complementary").is_visible():
                row(page, running[0].id).click()
            content, window = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
            assert content <= window == width
            _, found = checked(page)
            assert not found, "\n".join([f"{width} pixels, {theme}, panel {is_open}:", *found])


def test_the_answers_of_a_request_have_different_names_that_fit_their_column(
    open_page: OpenPage, noop_server: Server
) -> None:
    page = live(open_page(noop_server, "/#live", width=360))
    with answers(noop_server, n=12) as [answer]:
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": HEIGHTS[width]})
            expect(row(page, f"{answer.id}-11")).to_be_visible()
            names = page.locator(".batch-row:not([hidden]) .name")
            found = names.evaluate_all(
                "nodes => nodes.map((node) => [node.textContent, node.scrollWidth <= node.clientWidth])"
            )
            assert len({name for name, _ in found}) == len(found) >= 12
            assert all(fits for _, fits in found), found


class Meter:
    """What the browser counts of a page."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._session = page.context.new_cdp_session(page)
        self._session.send("Performance.enable")

    def read(self) -> dict[str, float]:
        self._session.send("HeapProfiler.collectGarbage")
        found = {one["name"]: one["value"] for one in self._session.send("Performance.getMetrics")["metrics"]}
        frames, at = self._page.locator(".live").evaluate("(one) => [one.dataset.frames, one.dataset.at]")
        return {**found, "frames": float(frames), "at": float(at)}

    def frames(self) -> float:
        return float(self._page.locator(".live").get_attribute("data-frames") or 0)


@contextmanager
def full_batch(server: Server, headers: dict[str, str]) -> Iterator[None]:
    """Requests with as many answers as the engine has rows. Their streams are read."""
    prompts = [f"Number {number}" for number in range(64)]
    fields = {"prompt": prompts, "stream": True, "max_tokens": 4000, "ignore_eos": True}
    closing = threading.Event()

    def read() -> None:
        with (
            httpx.Client(base_url=server.url, headers=headers, timeout=120) as client,
            client.stream("POST", "/v1/completions", json=fields) as response,
        ):
            for _ in response.iter_bytes():
                if closing.is_set():
                    return

    threads = [threading.Thread(target=read) for _ in range(NUM_ROWS // len(prompts))]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        closing.set()
        for thread in threads:
            thread.join(60)


def expect_full_batch(page: Page) -> None:
    expect(page.locator(".batch .figure")).to_contain_text(f"{NUM_ROWS} of {NUM_ROWS} rows in use")


@pytest.mark.long
def test_a_full_view_fits_its_window_and_axe_finds_no_serious_fault(
    open_page: OpenPage, default_model_path: Path
) -> None:
    """256 rows, as rows and as overview; requests of two keys that the server holds, with deadlines."""
    settings = {
        "api_keys": [api_key(ADMIN, admin=True), api_key(USER)],
        "backend_options": {**SLOW, "seconds_per_step": 0.05},
        "headers": bearer(ADMIN),
    }
    with running_server(default_model_path, **settings) as server:
        page = open_page(server, "/#live", width=1920, expected=["401"])
        enter_key(page)
        live(page)
        with full_batch(server, bearer(ADMIN)), held_answers(server, 3, n=40, deadline=500):
            # The gate keeps some rows for short requests of other keys.
            expect(page.locator(".batch .figure")).to_contain_text(re.compile(r"2[345]\d of 256 rows in use"))
            groups = page.locator(".queue .group:not([hidden])")
            expect(groups.filter(has_text=f"{USER} · held by the server")).to_be_visible()
            expect(groups.filter(has_text=f"{ADMIN} · held by the server")).to_be_visible()
            expect(page.locator(".queue tbody")).to_contain_text("in 8 min")
            for is_overview, width, theme in product((False, True), WIDTHS, THEMES):
                page.set_viewport_size({"width": width, "height": HEIGHTS[width]})
                page.emulate_media(color_scheme=theme)
                overview = page.get_by_role("button", name="Overview")
                if (overview.get_attribute("aria-pressed") == "true") is not is_overview:
                    overview.click()
                content, window = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
                assert content <= window == width
                _, found = checked(page)
                assert not found, "\n".join([f"{width} pixels, {theme}, overview {is_overview}:", *found])
        page.close()


def test_256_running_requests_keep_nodes_listeners_and_frames_bounded(
    open_page: OpenPage, default_model_path: Path, figures: dict[str, str]
) -> None:
    options = {**SLOW, "seconds_per_step": 0.05}
    with running_server(default_model_path, backend_options=options) as server:
        page = live(open_page(server, "/#live"))
        with full_batch(server, {}):
            expect_full_batch(page)
            meter = Meter(page)
            wait_for(lambda: meter.frames() > 20)
            before = meter.read()
            wait_for(lambda: meter.frames() >= before["frames"] + 40)
            after = meter.read()
            elements = page.evaluate("document.querySelectorAll('*').length")
            page.close()
    assert elements < 1000, "rows out of view must not be elements"
    assert after["Nodes"] < before["Nodes"] * 1.2
    assert after["JSEventListeners"] <= before["JSEventListeners"] + 20
    frames, seconds = after["frames"] - before["frames"], after["Timestamp"] - before["Timestamp"]
    # On the clock of the engine. A busy engine may answer late and make two frames shortly after each other.
    assert frames <= 10 * (after["at"] - before["at"]) + 5, "at most ten frames a second"
    each, all_tasks = (
        1000 * (after[name] - before[name]) / frames for name in ("ScriptDuration", "TaskDuration")
    )
    figures["live view of 256 requests"] = (
        f"{elements} elements, {each:.1f} ms of scripts and {all_tasks:.1f} ms in all a frame, {frames / seconds:.1f} frames a second"
    )
