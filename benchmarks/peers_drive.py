"""Drives weft inside one process, as the drivers in `peer_scripts` drive libraries: MODEL.

The engine is the one that `weft serve` runs, with the settings that it has by default; without HTTP, without a second
process, and without text. What goes in and comes out is said in `peer_scripts`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from time import perf_counter, sleep
from typing import Any

from weft.backends import registry
from weft.config import ServingEngineConfig
from weft.engine.serving import ServingEngine
from weft.request import InferenceRequest, SamplingParams, TokenOutput
from weft.server.settings import ServerSettings


def serving_config() -> ServingEngineConfig:
    """What `weft serve` runs with where nobody says otherwise."""
    return ServerSettings("", ()).engine


class Driver:
    """An engine on the CPU, and the requests that are under way."""

    def __init__(self, model: str, config: ServingEngineConfig) -> None:
        self._arrived: list[list[float]] = []
        """Where the time of this step goes: once for each of its tokens."""
        self._num_ended = 0
        self._num_running = 0
        self._changed = threading.Condition()
        self.engine = ServingEngine(
            registry.build("cpu", checkpoint=model), config, after_delivery=self._note_step
        )

    def run(self, phase: Mapping[str, Any]) -> list[dict[str, Any]]:
        """When each request was due, when its tokens came and when it ended, in seconds after the start of the phase."""
        start = perf_counter()
        if not phase["one_by_one"]:
            return self._run_items(phase["items"], start)
        return [request for item in phase["items"] for request in self._run_items([item], start)]

    def _run_items(self, items: Sequence[Mapping[str, Any]], start: float) -> list[dict[str, Any]]:
        """Submits each request when it is due, whatever became of those before it."""
        offset = perf_counter() - start
        times: list[list[float]] = [[] for _ in items]
        for item, arrivals in zip(items, times, strict=True):
            delay = start + offset + item["at"] - perf_counter()
            if delay > 0:
                sleep(delay)
            self._submit(item, arrivals)
        with self._changed:
            self._changed.wait_for(lambda: self._num_running == 0)
        return [
            {
                "began": offset + item["at"],
                "tokens": [time - start for time in arrivals],
                "ended": max(arrivals, default=perf_counter()) - start,
            }
            for item, arrivals in zip(items, times, strict=True)
        ]

    def _submit(self, item: Mapping[str, Any], arrivals: list[float]) -> None:
        def take(output: TokenOutput) -> None:
            if output.token_id is not None:
                self._arrived.append(arrivals)
            self._num_ended += output.is_final

        params = SamplingParams(max_tokens=item["max_tokens"], temperature=0.0, ignore_eos=True)
        with self._changed:
            self._num_running += 1
        self.engine.submit_with_callback(InferenceRequest(tuple(item["prompt"]), params), take)

    def _note_step(self) -> None:
        """In the engine's thread, after all that a step gave: one time for all of it, as a library's step has one."""
        now = perf_counter()
        for arrivals in self._arrived:
            arrivals.append(now)
        self._arrived.clear()
        if self._num_ended:
            with self._changed:
                self._num_running -= self._num_ended
                self._num_ended = 0
                self._changed.notify_all()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    driver = Driver(sys.argv[1], serving_config())
    gc.freeze()  # as the server's engine does
    with driver.engine:
        for line in sys.stdin:
            print(json.dumps(driver.run(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
