"""Runs weft in one process, as the drivers in `peer_scripts` run libraries. Argument: MODEL.

The engine has the default settings of `weft serve`, but no HTTP, no second process and no text. `peer_scripts` defines
the input and the output.
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
    """The default engine settings of `weft serve`."""
    return ServerSettings("", ()).engine


class Driver:
    """An engine on the CPU, and its running requests."""

    def __init__(self, model: str, config: ServingEngineConfig) -> None:
        self._step_tokens: list[list[float]] = []
        """For each token of the current step: the list of token times of its request. The time of the step is appended
        to each."""
        self._num_ended = 0
        self._num_running = 0
        self._changed = threading.Condition()
        self.engine = ServingEngine(
            registry.build("cpu", checkpoint=model), config, after_delivery=self._record_step
        )

    def run(self, phase: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Scheduled start, token times and end of each request, in seconds after the start of the phase."""
        start = perf_counter()
        if not phase["one_by_one"]:
            return self._run_items(phase["items"], start)
        return [request for item in phase["items"] for request in self._run_items([item], start)]

    def _run_items(self, items: Sequence[Mapping[str, Any]], start: float) -> list[dict[str, Any]]:
        """Submits each request at its time, whether or not earlier ones have ended."""
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
        def record_token(output: TokenOutput) -> None:
            if output.token_id is not None:
                self._step_tokens.append(arrivals)
            self._num_ended += output.is_final

        params = SamplingParams(max_tokens=item["max_tokens"], temperature=0.0, ignore_eos=True)
        with self._changed:
            self._num_running += 1
        self.engine.submit_with_callback(InferenceRequest(tuple(item["prompt"]), params), record_token)

    def _record_step(self) -> None:
        """Runs in the engine thread after each step. All tokens of a step get one time, as in the drivers of other
        engines."""
        now = perf_counter()
        for arrivals in self._step_tokens:
            arrivals.append(now)
        self._step_tokens.clear()
        if self._num_ended:
            with self._changed:
                self._num_running -= self._num_ended
                self._num_ended = 0
                self._changed.notify_all()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print to standard output, which only answers may use
    driver = Driver(sys.argv[1], serving_config())
    gc.freeze()  # as the engine process of the server does
    with driver.engine:
        for line in sys.stdin:
            print(json.dumps(driver.run(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
