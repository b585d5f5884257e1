"""The default model on the CPU, for `python -m benchmarks lengths --real`."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.lengths_traffic import run, traffic
from weft.backends import registry
from weft.clock import Clock
from weft.config import SchedulerConfig, ServingEngineConfig
from weft.engine.serving import ServingEngine
from weft.loading.checkpoint import open_checkpoint
from weft.loading.pull import pull

_SAMPLE = 24


def open_engine(config: SchedulerConfig) -> tuple[ServingEngine, Clock, Callable[[float], None]]:
    """A new engine, so that no run gets prefix hits from the last one."""
    backend = registry.build("cpu", checkpoint=open_checkpoint(pull("default")), threads=None)
    began = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - began

    engine = ServingEngine(backend, ServingEngineConfig(scheduler=config), clock=clock, seed=0)
    began = time.perf_counter()  # again, so that the time to open the engine does not count
    return engine, clock, lambda moment: time.sleep(max(0.0, moment - clock()))


def seconds_each(rows: int) -> float:
    """Seconds of a request if all rows are in use, from a sample of requests that arrive at once."""
    jobs = traffic(99, 1e6, _SAMPLE)
    run(*open_engine(SchedulerConfig(max_running=rows)), jobs, lambda job: None)
    # The last requests run while other rows are empty. So only the time until three quarters have ended counts.
    ends = sorted(job.ended for job in jobs)
    return ends[3 * _SAMPLE // 4 - 1] / (3 * _SAMPLE / 4)
