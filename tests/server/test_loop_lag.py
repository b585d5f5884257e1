"""Event loop lag: the time of callbacks counts, the run delay of the thread does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.server import loop_lag
from weft.server.loop_lag import watch_lag


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement follows the other, so that one of them contains the work of a test."""
    monkeypatch.setattr(loop_lag, "_PAUSE_SECONDS", 0.0)


def lags(work: Callable[[], object], is_busy: bool = True) -> list[float]:
    """The lags measured while `work` blocks the event loop once."""
    seen: list[float] = []

    async def run() -> None:
        watching = asyncio.create_task(watch_lag(seen.append, lambda: is_busy))
        await asyncio.sleep(0.02)
        work()
        await asyncio.sleep(0.05)
        watching.cancel()

    asyncio.run(run())
    return seen


def compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_a_long_callback_is_measured_as_lag() -> None:
    assert max(lags(lambda: compute(0.2))) > 0.1


def test_the_run_delay_of_the_thread_is_subtracted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schedstat = tmp_path / "schedstat"
    schedstat.write_text("0 0 0\n")
    monkeypatch.setattr(loop_lag, "_SCHEDSTAT", str(schedstat))

    def wait() -> None:
        began = time.monotonic()
        time.sleep(0.5)
        schedstat.write_text(f"0 {round(1e9 * (time.monotonic() - began))} 1\n")

    assert max(lags(wait)) < 0.25


def test_without_schedstat_no_run_delay_is_subtracted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_lag, "_SCHEDSTAT", "/nowhere")
    assert max(lags(lambda: time.sleep(0.2))) > 0.1


def test_nothing_is_measured_without_active_requests() -> None:
    assert lags(lambda: None, is_busy=False) == []
