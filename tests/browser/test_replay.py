"""`weft replay --show` in a browser: an event log, scrubbed step by step with the drawing of the live view."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from accessibility import checked
from browser_pages import HEIGHTS, THEMES, WIDTHS, OpenPage
from playwright.sync_api import Page, expect
from server_process import Server, wait_for
from shown_replay import shown

from weft.backends.noop import NoopBackend
from weft.clock import VirtualClock
from weft.config import KvCachePoolConfig, PriorityPolicy, SchedulerConfig, ServingEngineConfig
from weft.engine.serving import ServingEngine
from weft.request import InferenceRequest, Priority, RequestId, SamplingParams


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some hundred steps of a busy engine."""
    path = tmp_path_factory.mktemp("replay") / "incident.jsonl"
    clock, source = VirtualClock(), random.Random(2)
    config = ServingEngineConfig(
        SchedulerConfig(
            policy=PriorityPolicy.PRIORITY,
            max_running=8,
            max_tokens_per_step=64,
            max_prefill_tokens=48,
            max_chunk_tokens=24,
        ),
        KvCachePoolConfig(200, 4, swap_blocks=40),
        log_path=str(path),
    )
    engine = ServingEngine(NoopBackend(), config, clock=clock, seed=1)
    for number in range(60):
        prompt = tuple(source.randrange(3, 50) for _ in range(source.randrange(5, 100)))
        params = SamplingParams(max_tokens=source.randrange(10, 60), ignore_eos=True)
        name, priority = RequestId(f"request{number}"), source.choice(list(Priority))
        engine.submit(InferenceRequest(prompt, params, request_id=name, priority=priority))
    while engine.scheduler.sequences:
        engine.run_iteration()
        clock.advance(0.02)
    engine.stop()
    return path


@pytest.fixture(scope="module")
def replay_server(log: Path) -> Iterator[Server]:
    with shown(log) as server:
        wait_for(lambda: info(server)["is_complete"])
        yield server


def info(server: Server) -> dict[str, Any]:
    return dict(server.client.get("/live/info").raise_for_status().json())


def frame(server: Server, index: int) -> dict[str, Any]:
    found = server.client.get("/replay/frames", params={"start": index, "count": 1}).raise_for_status().json()
    return dict(found[0])


def expect_frame(page: Page, server: Server, index: int) -> None:
    wanted = frame(server, index)
    expect(page.locator(".position")).to_contain_text(f"{index + 1} / {info(server)['num_frames']}")
    tiles = page.locator(".tiles dd")
    expect(tiles.nth(0)).to_have_text(str(wanted["step"]))
    expect(tiles.nth(1)).to_have_text(str(wanted["num_running"]))
    expect(tiles.nth(2)).to_have_text(str(wanted["num_waiting"]))
    running = [values[0] for values in wanted["requests"] if values[1] >= 0]
    for name in running[:3]:
        expect(page.locator(f".batch-row[data-id='{name}']")).to_be_visible()


def test_the_slider_the_buttons_and_the_keys_scrub_through_the_frames(
    open_page: OpenPage, replay_server: Server
) -> None:
    last = info(replay_server)["num_frames"] - 1
    assert last > 250
    page = open_page(replay_server)
    expect(page.get_by_role("tab")).to_have_text(["Replay"])
    expect_frame(page, replay_server, 0)
    slider = page.get_by_role("slider", name="Frame")
    slider.fill("200")
    expect_frame(page, replay_server, 200)
    page.get_by_role("button", name="One frame back").click()
    expect_frame(page, replay_server, 199)
    page.get_by_role("button", name="One frame forward").click()
    expect_frame(page, replay_server, 200)
    page.get_by_role("listbox").focus()
    for key, index in (("ArrowRight", 201), ("Shift+ArrowLeft", 191), ("End", last), ("ArrowLeft", last - 1)):
        # Home and End belong to the list while it has the focus.
        target = page.locator(".replay-bar button").first if key == "End" else page.get_by_role("listbox")
        target.focus()
        page.keyboard.press(key)
        expect_frame(page, replay_server, index)
    slider.focus()
    page.keyboard.press("Home")
    expect_frame(page, replay_server, 0)


def test_a_replay_plays_at_the_chosen_speed_and_stops(open_page: OpenPage, replay_server: Server) -> None:
    page = open_page(replay_server)
    expect_frame(page, replay_server, 0)
    page.get_by_label("Speed").select_option("50×")
    page.get_by_role("button", name="Play").click()
    last = info(replay_server)["num_frames"] - 1
    expect_frame(page, replay_server, last)
    expect(page.get_by_role("button", name="Play")).to_be_visible()
    page.get_by_label("Speed").select_option("0.1×")
    page.get_by_role("button", name="Play").click()
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Play")).to_be_visible()


def test_a_request_of_a_log_shows_its_life_and_cannot_be_cancelled(
    open_page: OpenPage, replay_server: Server
) -> None:
    page = open_page(replay_server)
    last = info(replay_server)["num_frames"] - 1
    page.get_by_role("slider", name="Frame").fill(str(last))
    page.locator(".ended button").first.click()
    panel = page.get_by_role("complementary")
    expect(panel).to_contain_text("finished: length")
    expect(panel.get_by_role("button", name="Cancel this request")).to_be_hidden()
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()


def test_a_cut_log_says_so_and_shows_the_frames_before(
    open_page: OpenPage, log: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut.jsonl"
    content = log.read_bytes()
    cut.write_bytes(content[: len(content) // 2])
    with shown(cut) as server:
        page = open_page(server)
        expect_frame(page, server, 0)
        wait_for(lambda: info(server)["problem"])
        expect(page.locator(".live-notice")).to_have_text(info(server)["problem"])
        last = info(server)["num_frames"] - 1
        page.locator(".replay-bar button").first.focus()
        page.keyboard.press("End")
        expect_frame(page, server, last)
        page.close()


def test_the_replay_fits_its_window_and_axe_finds_no_serious_fault(
    open_page: OpenPage, replay_server: Server
) -> None:
    page = open_page(replay_server)
    page.get_by_role("slider", name="Frame").fill("100")
    expect_frame(page, replay_server, 100)
    for width, theme in product(WIDTHS, THEMES):
        page.set_viewport_size({"width": width, "height": HEIGHTS[width]})
        page.emulate_media(color_scheme=theme)
        content, window = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert content <= window == width
        _, found = checked(page)
        assert not found, "\n".join([f"{width} pixels, {theme}:", *found])
