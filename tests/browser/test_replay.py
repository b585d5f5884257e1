"""`weft replay --show` in a browser: an event log, scrubbed step by step with the drawing of the live view."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
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
from weft.simulation.run import Simulation
from weft.simulation.scenario import draw


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
        KvCachePoolConfig(120, 4, swap_blocks=40),
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


def test_the_life_of_a_request_is_complete_after_a_seek(open_page: OpenPage, replay_server: Server) -> None:
    last = info(replay_server)["num_frames"] - 1
    of_all = [
        (index, event)
        for start in range(0, last + 1, 256)
        for index, one in enumerate(
            replay_server.client.get("/replay/frames", params={"start": start, "count": 256}).json(), start
        )
        for event in one["events"]
    ]
    ends = {event[3]: index for index, event in of_all if event[2] == "finished"}
    # The page loads 240 frames: the beginning of this request is in none of them.
    name, end = max(ends.items(), key=lambda item: item[1])
    assert end > 260
    admitted = next(index for index, event in of_all if event[2:4] == ["admitted", name])
    page = open_page(replay_server)
    slider = page.get_by_role("slider", name="Frame")
    slider.fill(str(end - 1))
    expect_frame(page, replay_server, end - 1)
    page.locator(f".batch-row[data-id='{name}'] .name").click()
    lines = page.locator(".request .lines li:not([hidden])")
    expect(lines.first).to_contain_text("queued")
    expect(lines.nth(1)).to_contain_text("admitted to row")
    chunks = page.get_by_role("complementary").get_by_text("prefill of the tokens 0–")
    expect(chunks.first).to_be_visible()
    expect(page.get_by_text("Earlier events are not shown.")).to_be_hidden()
    for index, state in (
        (end, "ended: length"),
        (admitted, "prefilling"),
        (1, "waiting"),
        (end - 1, "decoding"),
    ):
        slider.fill(str(index))
        expect_frame(page, replay_server, index)
        expect(page.locator(".request .facts")).to_contain_text(state)
        expect(lines.first).to_contain_text("queued")
    slider.fill("0")  # before its arrival
    expect(page.locator(".request .facts")).to_contain_text("not in the engine at this step")
    expect(lines).to_have_count(0)


def test_a_life_whose_earlier_events_are_missing_says_so(open_page: OpenPage, replay_server: Server) -> None:
    page = open_page(replay_server, expected=["500"])
    page.route("**/replay/requests/**", lambda route: route.fulfill(status=500, json={}))
    last = info(replay_server)["num_frames"] - 1
    page.get_by_role("slider", name="Frame").fill(str(last))
    page.locator(".ended button").first.click()
    expect(page.get_by_text("Earlier events are not shown.")).to_be_visible()


def test_a_click_on_the_overview_and_the_button_jump_through_the_log(
    open_page: OpenPage, replay_server: Server
) -> None:
    number = info(replay_server)["num_frames"]
    page = open_page(replay_server)
    expect_frame(page, replay_server, 0)
    strip = page.locator(".overview canvas")
    box = strip.bounding_box()
    assert box is not None
    strip.click(position={"x": box["width"] / 2, "y": 10})
    slider = page.get_by_role("slider", name="Frame")
    expect(slider).not_to_have_value("0")
    assert abs(int(slider.input_value()) - number / 2) <= number / box["width"] + 1
    slider.fill("0")
    after = replay_server.client.get("/replay/preemption", params={"after": 0}).json()["frame"]
    page.get_by_role("button", name="Next preemption").focus()
    page.keyboard.press("Enter")
    expect_frame(page, replay_server, after)
    assert any(event[2] == "preempted" for event in frame(replay_server, after)["events"])


def test_a_replay_shows_nothing_that_a_log_cannot_know(open_page: OpenPage, replay_server: Server) -> None:
    page = open_page(replay_server)
    expect_frame(page, replay_server, 0)
    expect(page.locator(".queue .figure")).to_contain_text("in the engine")
    assert "held by the server" not in page.locator(".live").inner_text()


def test_a_cut_log_says_so_and_shows_the_frames_before(
    open_page: OpenPage, log: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut.jsonl"
    content = log.read_bytes()
    cut.write_bytes(content[: len(content) // 2])
    with shown(cut) as server:
        page = open_page(server)
        wait_for(lambda: info(server)["problem"])
        expect_frame(page, server, 0)
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


# --- a cache with two tiers ---


def tiered_scenario() -> int:
    """The seed of a scenario whose frames have blocks of the quantised tier, of sessions and of swapped requests."""
    for seed in range(300, 1000):
        simulation = Simulation(draw(seed))
        engine, seen = simulation.engine, set[str]()
        if not (engine.live_info().store_blocks and engine.live_info().swap_blocks):
            continue
        run_iteration = engine.run_iteration

        def run_and_look(
            run: Any = run_iteration, engine: ServingEngine = engine, seen: set[str] = seen
        ) -> Any:
            outputs, frame = run(), engine.live_frame()
            seen.update(frame.blocks, ["swapped"] * any(one.state == "swapped" for one in frame.requests))
            return outputs

        engine.run_iteration = run_and_look  # type: ignore[method-assign]
        simulation.run()
        if {"h", "H", "U", "C", "swapped"} <= seen:
            return seed
    raise AssertionError("no scenario has all kinds of blocks")


@pytest.fixture(scope="module")
def tiered_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("tiers") / "tiers.jsonl"
    simulation = Simulation(draw(tiered_scenario()), str(path))
    simulation.run()
    simulation.engine.stop()
    with shown(path) as server:
        wait_for(lambda: info(server)["is_complete"])
        yield server


WORDS = {
    "u": "used by one request",
    "s": "shared by prefix",
    "c": "cached",
    "h": "hot by session",
    "f": "free",
}


def frames_with(server: Server, **wanted: Callable[[dict[str, Any]], bool]) -> dict[str, int]:
    """The first frame of each kind."""
    found: dict[str, int] = {}
    for index in range(info(server)["num_frames"]):
        one = frame(server, index)
        for name, is_it in wanted.items():
            if name not in found and is_it(one):
                found[name] = index
    assert found.keys() == wanted.keys()
    return found


def test_the_legend_counts_the_blocks_of_both_tiers_and_the_keys_read_each_block(
    open_page: OpenPage, tiered_server: Server
) -> None:
    page = open_page(tiered_server)
    slider = page.get_by_role("slider", name="Frame")
    blocks = page.get_by_role("img", name=re.compile("^(Map of|block )"))
    counts = page.locator(".counts > div")
    kinds = frames_with(
        tiered_server,
        hot=lambda one: "h" in one["blocks"],
        store=lambda one: "U" in one["blocks"] and "C" in one["blocks"],
        hot_store=lambda one: "H" in one["blocks"],
    )
    for kind, index in kinds.items():
        slider.fill(str(index))
        expect_frame(page, tiered_server, index)
        shown_blocks = frame(tiered_server, index)["blocks"]
        for letter, words in WORDS.items():
            number = shown_blocks.count(letter) + shown_blocks.count(letter.upper())
            expect(counts.filter(has_text=words).locator("dd")).to_have_text(str(number))
        used, total = frame(tiered_server, index)["store_blocks_used"], info(tiered_server)["store_blocks"]
        expect(counts.filter(has_text="quantised tier").locator("dd")).to_have_text(f"{used} of {total}")
        letter = {"hot": "h", "store": "C", "hot_store": "H"}[kind]
        blocks.focus()
        page.keyboard.press("Home")
        for _ in range(shown_blocks.index(letter)):
            page.keyboard.press("ArrowRight")
        words = WORDS[letter.lower()] + (" (quantised)" if letter.isupper() else "")
        text = f"block {shown_blocks.index(letter)}: {words}"
        expect(page.locator(".kv .tip").first).to_have_text(text)
        expect(blocks).to_have_attribute("aria-label", text)
        expect(page.locator("#status")).to_have_text(text)
        slider.focus()
        expect(blocks).to_have_attribute("aria-label", re.compile("^Map of"))


def test_the_swap_space_names_the_requests_in_it(open_page: OpenPage, tiered_server: Server) -> None:
    page = open_page(tiered_server)
    (index,) = frames_with(
        tiered_server, swapped=lambda one: any(r[2] == "swapped" and r[13] for r in one["requests"])
    ).values()
    page.get_by_role("slider", name="Frame").fill(str(index))
    expect_frame(page, tiered_server, index)
    wanted = frame(tiered_server, index)
    name, number = next((r[0], r[13]) for r in wanted["requests"] if r[2] == "swapped" and r[13])
    swap = page.get_by_role("img", name="Swap space")
    text = f"Swap space: {wanted['swap_blocks_used']} of {info(tiered_server)['swap_blocks']} slot"
    expect(swap).to_have_attribute("aria-label", re.compile(f"^{text}s? in use; {name[:8]} {number}"))
    swap.hover(position={"x": 3, "y": 3})
    expect(page.locator(".swap .tip")).to_contain_text(f"request {name[:8]}: {number} slot")
