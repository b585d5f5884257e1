"""What the live view computes from frames before it draws. The functions run in the browser, on frames of a real engine."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import pytest
from playwright.sync_api import Browser, Page
from server_process import Server

from weft.backends.noop import NoopBackend
from weft.clock import VirtualClock
from weft.config import KvCachePoolConfig, PriorityPolicy, SchedulerConfig, ServingEngineConfig
from weft.engine.live_recorder import LiveRecorder
from weft.engine.serving import ServingEngine
from weft.live import FINISH_REASONS, LiveFrame
from weft.metrics import Histogram
from weft.request import FinishReason, InferenceRequest, Priority, RequestId, SamplingParams
from weft.simulation.run import Simulation
from weft.simulation.scenario import draw

long = pytest.mark.long
NUM_BLOCKS, NUM_ROWS = 90, 4
ENDS = ("finished", "failed")
COMPLETE = {
    ("finished", FINISH_REASONS.index(reason))
    for reason in (FinishReason.LENGTH, FinishReason.STOP, FinishReason.END_OF_SEQUENCE)
}
HISTORY = """
async ({info, frames}) => {
  const { History } = await import("/page/live_history.js");
  const history = new History(info);
  for (const frame of frames) history.add(frame);
"""


@pytest.fixture(scope="module")
def page(browser: Browser, noop_server: Server) -> Iterator[Page]:
    page = browser.new_page(base_url=noop_server.url)
    page.goto("/")
    yield page
    page.close()


def in_json(frame: LiveFrame, **fields: Any) -> dict[str, Any]:
    found = json.loads(
        json.dumps({**asdict(frame), "engine": "ready", "keys": {}, "held": [], "num_held": 0, **fields})
    )
    for name in ("requests", "steps", "events"):
        found[name] = [list(one) for one in getattr(frame, name)]
    return found


class Run:
    """A busy engine with few blocks, so that it preempts; a frame after every few steps."""

    def __init__(self, steps_per_frame: int, seed: int = 3) -> None:
        clock = VirtualClock()
        config = ServingEngineConfig(
            SchedulerConfig(
                policy=PriorityPolicy.PRIORITY,
                max_running=NUM_ROWS,
                max_tokens_per_step=64,
                max_prefill_tokens=48,
                max_chunk_tokens=24,
            ),
            KvCachePoolConfig(NUM_BLOCKS, 4, swap_blocks=40),
        )
        engine = ServingEngine(NoopBackend(), config, clock=clock, seed=1)
        source = random.Random(seed)
        self.results = {}
        self.lengths = {}
        engine.live_frame()
        for number in range(14):
            length = source.randrange(5, 120)
            name = RequestId(f"request{number}")
            self.lengths[name] = length
            params = SamplingParams(max_tokens=source.randrange(2, 40), ignore_eos=True)
            prompt = tuple(source.randrange(3, 50) for _ in range(length))
            priority = source.choice(list(Priority))
            engine.submit(InferenceRequest(prompt, params, request_id=name, priority=priority))
        self.frames = [in_json(engine.live_frame())]
        while engine.scheduler.sequences:
            for _ in range(steps_per_frame):
                engine.run_iteration()
                clock.advance(0.01)
            self.frames.append(in_json(engine.live_frame()))
        self.info = info_of(engine)
        self.totals = engine.scheduler.stats

    def ask(self, page: Page, script: str) -> Any:
        return page.evaluate(HISTORY + script + "}", {"info": self.info, "frames": self.frames})


@pytest.fixture(scope="module", params=[1, 7])
def run(request: pytest.FixtureRequest) -> Run:
    return Run(request.param)


class DraftRun(Run):
    """A scenario of the simulation with draft tokens, a frame after each iteration."""

    def __init__(self, seed: int) -> None:
        self.frames, simulation = watched_scenario(seed)
        engine = simulation.engine
        self.info = info_of(engine)
        self.totals = engine.scheduler.stats


def watched_scenario(seed: int) -> tuple[list[dict[str, Any]], Simulation]:
    simulation = Simulation(draw(seed))
    engine = simulation.engine
    engine._live = LiveRecorder(engine.scheduler, engine._metrics, lapse=1e9)
    frames = [in_json(engine.live_frame())]
    run_iteration = engine.run_iteration

    def run_and_look() -> Any:
        outputs = run_iteration()
        frames.append(in_json(engine.live_frame()))
        return outputs

    engine.run_iteration = run_and_look  # type: ignore[method-assign]
    simulation.run()
    return frames, simulation


def info_of(engine: ServingEngine) -> dict[str, Any]:
    return {
        **asdict(engine.live_info()),
        "reasons": [reason.value for reason in FINISH_REASONS],
        "buckets": [Histogram.FIRST, Histogram.GROWTH],
        "priorities": [priority.name.lower() for priority in Priority],
    }


CELLS = """
  const { band } = history, cells = [];
  for (let number = band.first; number < band.count; number++) for (let row = 0; row < band.numRows; row++) {
    const at = band.at(number, row);
    if (band.owner[at]) cells.push({ id: history.lifeOfNumber(band.owner[at]).id, row, column: band.column(number),
      prefill: band.prefill[at], decode: band.decode[at], accepted: band.accepted[at], rejected: band.rejected[at], marks: band.marks[at] });
  }
  return cells;
"""


def test_the_band_has_each_prompt_token_that_the_engine_computed(page: Page, run: Run) -> None:
    chunks: dict[str, int] = defaultdict(int)
    for frame in run.frames:
        for _, _, kind, name, _, tokens in frame["events"]:
            if kind == "chunk":
                chunks[name] += tokens
    drawn: dict[str, float] = defaultdict(float)
    for cell in run.ask(page, CELLS):
        drawn[cell["id"]] += cell["prefill"]
    assert {name: tokens for name, tokens in drawn.items() if tokens} == chunks
    assert set(chunks) == set(run.lengths)


@long
def test_the_band_has_each_decoded_token_in_the_row_of_its_request(page: Page) -> None:
    run = Run(1)
    rows = {}
    decoded: dict[str, float] = defaultdict(float)
    for frame in run.frames:
        for values in frame["requests"]:
            if values[1] >= 0:
                rows.setdefault(values[0], set()).add(values[1])
    for cell in run.ask(page, CELLS):
        decoded[cell["id"]] += cell["decode"] * (cell["column"]["last"] - cell["column"]["first"] + 1)
        assert cell["id"] not in rows or cell["row"] in rows[cell["id"]]
    # The first token of a request comes with its last chunk, and so does the first one after a recompute.
    others = sum(
        1 for frame in run.frames for event in frame["events"] if event[2] == "preempted" and not event[4]
    )
    assert abs(sum(decoded.values()) - (run.totals.tokens_generated - len(run.lengths))) <= others


@long
def test_the_band_has_each_accepted_and_each_rejected_draft_token(page: Page) -> None:
    """Of requests that end by themselves. Draft tokens of a request that is cancelled while its step is in flight count in
    the totals, and belong to no row."""
    num_runs = 0
    for seed in range(300, 600):
        if draw(seed).engine.scheduler.max_draft_tokens == 0:
            continue
        run = DraftRun(seed)
        accepted, drafted = run.totals.drafts_accepted, run.totals.tokens_drafted
        ends = {(event[2], event[4]) for one in run.frames for event in one["events"] if event[2] in ENDS}
        if not 5 < accepted < drafted - 5 or not ends <= COMPLETE:
            continue
        found: dict[str, float] = defaultdict(float)
        for cell in run.ask(page, CELLS):
            steps = cell["column"]["last"] - cell["column"]["first"] + 1
            found["accepted"] += cell["accepted"] * steps
            found["rejected"] += cell["rejected"] * steps
        assert found["accepted"] == pytest.approx(accepted), f"scenario {seed}"
        assert found["rejected"] == pytest.approx(drafted - accepted), f"scenario {seed}"
        num_runs += 1
        if num_runs == 3:
            return
    raise AssertionError("too few scenarios have draft tokens")


def test_the_charts_have_the_totals_of_the_scheduler(page: Page, run: Run) -> None:
    bins, points = run.ask(page, "return [history.bins, history.series(1)];")
    sums: dict[str, float] = defaultdict(float)
    for one in bins:
        for name in ("steps", "stepSeconds", "tokens", "prefilled", "prompt", "cached"):
            sums[name] += one[name]
    steps = [step for frame in run.frames for step in frame["steps"]]
    stats = run.totals
    assert sums == {
        "steps": stats.steps,
        "stepSeconds": pytest.approx(sum(step[1] for step in steps)),
        "tokens": stats.tokens_generated,
        "prefilled": sum(step[5] for step in steps),
        "prompt": stats.prompt_tokens,
        "cached": stats.prompt_tokens_cached,
    }
    assert sums["stepSeconds"] > 0 and sums["prompt"] == sum(run.lengths.values())

    frames: dict[float, list[tuple[dict[str, Any], dict[str, Any]]]] = defaultdict(list)
    for before, frame in pairwise(run.frames):
        frames[frame["at"] // 0.5 * 0.5].append((before, frame))
    assert len(frames) > 2 and [point["at"] for point in points] == sorted(frames)
    for point in points:
        (first, _), (_, last) = frames[point["at"]][0], frames[point["at"]][-1]
        shown = [step[1] for _, frame in frames[point["at"]] for step in frame["steps"]]
        generated = last["totals"]["tokens_generated"] - first["totals"]["tokens_generated"]
        assert point["tokens"] == pytest.approx(generated / (last["at"] - first["at"]))
        assert point["step"] == pytest.approx(sum(shown) / len(shown)) and point["slowest"] == max(shown)


def test_prefix_hits_of_requests_that_no_frame_has_are_in_the_charts(page: Page) -> None:
    clock = VirtualClock()
    engine = ServingEngine(
        NoopBackend(), ServingEngineConfig(cache=KvCachePoolConfig(NUM_BLOCKS, 4)), clock=clock, seed=1
    )
    frames = [in_json(engine.live_frame())]
    for number in range(6):  # each begins and ends between two frames
        prompt = (*range(3, 23 + number),)
        engine.submit(InferenceRequest(prompt, SamplingParams(max_tokens=1)))
        engine.run_until_idle()
        clock.advance(0.3)
        frames.append(in_json(engine.live_frame()))
        assert not frames[-1]["requests"]
    bins, hits = page.evaluate(
        HISTORY + "return [history.bins, history.series().at(-1).hits]; }",
        {"info": info_of(engine), "frames": frames},
    )
    stats = engine.scheduler.stats
    assert sum(one["prompt"] for one in bins) == stats.prompt_tokens == sum(range(20, 26))
    assert sum(one["cached"] for one in bins) == stats.prompt_tokens_cached > 0
    assert hits == pytest.approx(stats.prompt_tokens_cached / stats.prompt_tokens)


@long
def test_preemptions_and_ends_are_marked(page: Page, run: Run) -> None:
    marks = {"preempted": 8, "swapped_out": 16, "finished": 4, "admitted": 1, "first_token": 2}
    found = {mark for cell in run.ask(page, CELLS) for mark in marks.values() if cell["marks"] & mark}
    wanted = {marks["finished"], marks["admitted"], marks["first_token"]}
    if run.totals.preemptions_by_recompute:
        wanted.add(marks["preempted"])
    if run.totals.preemptions_by_swap:
        wanted.add(marks["swapped_out"])
    assert len(wanted) > 3, "the run must preempt"
    assert wanted <= found


@long
def test_the_map_has_the_states_of_the_last_frames(page: Page, run: Run) -> None:
    counts = run.ask(
        page, "return Object.fromEntries([...'fuschi'].map((one) => [one, history.blocks.count(one)]));"
    )
    blocks = run.frames[-1]["blocks"]
    assert len(blocks) == NUM_BLOCKS
    assert counts == {letter: blocks.count(letter) for letter in "fuschi"}


@long
def test_a_life_has_its_events_in_order_and_its_end(page: Page, run: Run) -> None:
    lives = run.ask(
        page,
        """
  const { linesOf, phasesOf } = await import("/page/live_request.js");
  return [...history.lives.values()].map((life) => ({ lines: linesOf(life, info.reasons), phases: phasesOf(life, history.frame.at),
    end: life.end }));
""",
    )
    assert len(lives) == len(run.lengths)
    for life in lives:
        texts = [line["text"] for line in life["lines"]]
        assert texts[0] == "queued" and texts[-1] == "finished: length"
        assert [line["at"] for line in life["lines"]] == sorted(line["at"] for line in life["lines"])
        assert any(text.startswith("prefill of the tokens 0–") for text in texts)
        assert life["phases"][-1]["to"] == life["end"]["at"]
        for before, after in zip(life["phases"], life["phases"][1:], strict=False):
            assert before["to"] == after["from"] and before["state"] != after["state"]


@long
def test_quantiles_are_those_of_the_metrics(page: Page) -> None:
    histogram, source = Histogram(), random.Random(1)
    for _ in range(500):
        histogram.record(source.lognormvariate(-3, 2))
    counts = {str(bucket): count for bucket, count in enumerate(histogram.counts) if count}
    shares = [0.0, 0.1, 0.5, 0.9, 0.99]
    found = page.evaluate(
        """async ({counts, shares, buckets}) => {
          const { countsSince, quantile } = await import("/page/live_numbers.js");
          return shares.map((share) => quantile(countsSince(counts, {}), share, buckets));
        }""",
        {"counts": counts, "shares": shares, "buckets": [Histogram.FIRST, Histogram.GROWTH]},
    )
    assert found == pytest.approx([histogram.quantile(share) for share in shares])


@long
def test_an_engine_that_starts_again_begins_a_new_history(page: Page) -> None:
    run = Run(7)
    middle = len(run.frames) // 2
    run.frames = run.frames[:middle] + run.frames[:3]
    ends, bins, waiting = run.ask(
        page,
        """return [[...history.lives.values()].map((life) => life.end?.kind), history.bins, history.frame.num_waiting];""",
    )
    assert "lost" in ends
    assert all(value >= 0 for one in bins for value in (one["tokens"], one["prompt"], one["seconds"]))
    assert waiting == run.frames[-1]["num_waiting"]


@long
@pytest.mark.parametrize("blocks", [1, 90, 4096, 300_001])
@pytest.mark.parametrize("size", [(300, 200), (1200, 40), (20, 20)])
def test_every_block_has_a_cell_and_the_cells_fit_their_box(
    page: Page, blocks: int, size: tuple[int, int]
) -> None:
    shape, cells, shares = page.evaluate(
        """async ([blocks, width, height]) => {
          const { aggregate, BlockStates, grid } = await import("/page/live_cells.js");
          const states = new BlockStates(blocks);
          states.write(0, "f".repeat(blocks));
          states.write(blocks - 1, "u");
          const shape = grid(blocks, width, height);
          const cells = aggregate(states.codes, shape.perCell);
          return [shape, cells.states.length, [cells.shares[0], cells.shares[cells.shares.length - 1]]];
        }""",
        [blocks, *size],
    )
    assert cells * shape["perCell"] >= blocks > (cells - 1) * shape["perCell"]
    assert cells <= shape["columns"] * shape["rows"]
    assert shape["columns"] * shape["size"] <= size[0] and shape["rows"] * shape["size"] <= size[1]
    assert shares[1] > 0 and (blocks <= shape["perCell"] or shares[0] == 0)


@long
def test_swapped_requests_own_the_used_slots_of_the_swap_space(page: Page) -> None:
    run = Run(1)
    numbers = page.evaluate(
        """async (frames) => {
          const { slotsOf } = await import("/page/live_swap.js");
          const { readFrame } = await import("/page/live_numbers.js");
          return frames.map((frame) => slotsOf(readFrame(frame)).map(({ id, first, end }) => [id, first, end]));
        }""",
        run.frames,
    )
    assert any(numbers), "the run must swap"
    for frame, slots in zip(run.frames, numbers, strict=True):
        swapped = {one[0]: one[13] for one in frame["requests"] if one[2] == "swapped"}
        assert {name: end - first for name, first, end in slots} == {
            name: number for name, number in swapped.items() if number
        }
        assert sum(end - first for _, first, end in slots) <= frame["swap_blocks_used"]
        assert [first for _, first, _ in slots] == [0, *(end for _, _, end in slots)][: len(slots)]


@long
def test_the_queue_is_grouped_by_priority_and_key_with_the_longest_wait_first(page: Page) -> None:
    groups = page.evaluate(
        """async () => {
          const { groupQueue } = await import("/page/live_queue.js");
          const one = (id, priority, key, age, place = "engine", left = null) => ({ id, priority, key, age, place, left });
          return groupQueue([one("a", 1, "x", 1), one("b", 2, "x", 1, "server"), one("c", 1, "x", 3, "engine", 5), one("d", 3, null, 1),
            one("e", 1, "y", 2, "engine", 4), one("f", 1, "x", 2, "engine", 7)])
            .map((group) => [group.priority, group.key, group.members.map((member) => member.id).join(""), group.deadline, group.longest]);
        }"""
    )
    assert groups == [
        [3, None, "d", None, 1],
        [1, "x", "cfa", 5, 3],
        [1, "y", "e", 4, 2],
        [2, "x", "b", None, 1],
    ]


@long
def test_pages_of_a_replay_are_bounded_and_a_short_one_is_loaded_again(page: Page) -> None:
    most, loads, last = page.evaluate(
        """async () => {
          const { FramePages } = await import("/page/replay.js");
          let total = 95, loads = [], most = 0;
          const load = async (start, count) => { loads.push(start); return Array.from({ length: Math.max(0, Math.min(count, total - start)) }, (_, index) => start + index); };
          const pages = new FramePages(load, { size: 10, limit: 4 });
          pages.total = total;
          for (let at = 0; at < 90; at += 3) {
            const found = await pages.frames(at, at + 12);
            if (found.join() !== Array.from({ length: Math.min(12, total - at) }, (_, index) => at + index).join()) throw new Error("wrong frames at " + at);
            most = Math.max(most, pages.count);
          }
          const before = loads.length;
          total = pages.total = 99;
          const last = await pages.frames(93, 99);
          return [most, loads.length - before, last];
        }"""
    )
    assert most <= 4 and loads == 1 and last == [93, 94, 95, 96, 97, 98]


@long
def test_pauses_between_attempts_to_connect_grow(page: Page) -> None:
    pauses = page.evaluate(
        """async () => {
          const { pauseAfter } = await import("/page/live_source.js");
          return [0, 1, 2, 3, 9].map((failures) => pauseAfter(failures, null)).concat(pauseAfter(0, 10));
        }"""
    )
    assert pauses[:-1] == sorted(pauses[:-1]) and pauses[0] < 1 and pauses[4] <= 15 and pauses[-1] == 10
