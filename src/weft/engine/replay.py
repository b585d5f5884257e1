"""Records a run of the scheduler in an event log, and replays it.

The scheduler is deterministic: the requests, cancels, results and clock readings that it gets determine its plans. The
log contains these inputs and the plans, in order, one JSON object per line. A replay passes the inputs to a new
scheduler and compares its plans with those of the log.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from weft.clock import Clock
from weft.config import PreemptionMode, PriorityPolicy, SchedulerConfig
from weft.engine.event_log import EventLog
from weft.errors import WeftError
from weft.plan import BackendInfo, IterationPlan, StepResult
from weft.request import (
    Failure,
    FailureKind,
    Grammar,
    InferenceRequest,
    Priority,
    RequestId,
    SamplingParams,
    TokenLogprobs,
)
from weft.scheduling.scheduler import ContinuousBatchScheduler
from weft.scheduling.sequence import Sequence

LOG_VERSION = 6


class _ReadingsClock:
    """Reads a clock and records the readings since the last event."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.readings: list[float] = []

    def __call__(self) -> float:
        now = self._clock()
        self.readings.append(now)
        return now

    def take(self) -> list[float]:
        taken, self.readings = self.readings, []
        return taken


class _ReplayClock:
    """Returns the clock readings of the log."""

    def __init__(self) -> None:
        self.readings: Iterator[float] = iter(())

    def __call__(self) -> float:
        try:
            return next(self.readings)
        except StopIteration:
            raise ReplayDifference("the clock is read more often than in the recorded run") from None


class ReplayDifference(WeftError):
    """The replay differs from its log."""


class _RecordingScheduler(ContinuousBatchScheduler):
    """The scheduler, logging every call that changes its state."""

    def __init__(
        self, config: SchedulerConfig, info: BackendInfo, clock: _ReadingsClock, log: EventLog
    ) -> None:
        super().__init__(config, info, clock)
        self._log = log
        self._readings = clock
        self._write("start", version=LOG_VERSION, config=_plain(config), info=_plain(info))

    def add(self, *sequences: Sequence) -> None:
        super().add(*sequences)
        self._write("add", requests=[_added(sequence) for sequence in sequences])

    def cancel(self, request_id: RequestId, reason: str | None = None) -> bool:
        done = super().cancel(request_id, reason)
        if done:
            self._write("cancel", id=request_id, reason=reason)
        return done

    def finish(self, request_id: RequestId, num_tokens: int) -> bool:
        done = super().finish(request_id, num_tokens)
        if done:
            self._write("finish", id=request_id, num_tokens=num_tokens)
        return done

    def fail_request(self, request_id: RequestId, failure: Failure) -> bool:
        done = super().fail_request(request_id, failure)
        if done:
            self._write("fail_request", id=request_id, failure=_plain(failure))
        return done

    def schedule(self) -> IterationPlan | None:
        plan = super().schedule()
        self._write("plan", plan=None if plan is None else describe(plan))
        return plan

    def apply(self, plan: IterationPlan, result: StepResult, seconds: float | None = None) -> None:
        super().apply(plan, result, seconds)
        self._write("apply", result=_plain(result), seconds=seconds)

    def fail(self, result: StepResult, later_results: Iterable[StepResult] = ()) -> None:
        later_results = list(later_results)
        super().fail(result, later_results)
        self._write("fail", result=_plain(result), behind=[_plain(r) for r in later_results])

    def _write(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, "clock": self._readings.take(), **fields})
        self._log.write(line.encode() + b"\n")


class RunRecorder:
    """Owns the event log of a run and the scheduler that writes it."""

    def __init__(self, path: str, config: SchedulerConfig, info: BackendInfo, clock: Clock) -> None:
        self._log = EventLog(path)
        self.scheduler = _RecordingScheduler(config, info, _ReadingsClock(clock), self._log)

    def close(self) -> None:
        self._log.close()


@dataclasses.dataclass
class ReplayReport:
    requests: int = 0
    steps: int = 0
    tokens: int = 0
    is_cut: bool = False
    """Whether the last line of the log is incomplete. All lines before it were replayed."""


def replay(path: str) -> ReplayReport:
    """Replays a log. Raises ReplayDifference, with the line number, if a plan differs from the recorded one."""
    report = ReplayReport()
    clock = _ReplayClock()
    scheduler: ContinuousBatchScheduler | None = None
    plans: list[IterationPlan] = []
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            if scheduler is not None and not line.endswith("\n"):
                report.is_cut = True
                break
            try:
                event = json.loads(line)
                clock.readings = iter(event["clock"])
            except (ValueError, KeyError, TypeError) as error:
                raise ReplayDifference(f"{where}: not a weft log, or cut short ({error})") from error
            try:
                if scheduler is None:
                    scheduler = _scheduler_from(event, clock)
                else:
                    _replay_event(scheduler, event, plans, report)
                if next(clock.readings, None) is not None:
                    raise ReplayDifference("the clock is read less often than in the recorded run")
            except WeftError as difference:
                raise ReplayDifference(f"{where}: {difference}") from None
            except Exception as error:
                raise ReplayDifference(
                    f"{where}: cannot be replayed ({type(error).__name__}: {error})"
                ) from error
    if scheduler is None:
        raise ReplayDifference(f"{path} is empty: not a weft log")
    return report


def _replay_event(
    scheduler: ContinuousBatchScheduler,
    event: dict[str, Any],
    plans: list[IterationPlan],
    report: ReplayReport,
) -> None:
    kind = event["event"]
    if kind == "add":
        added = event["requests"]
        scheduler.add(*(Sequence(_request_from(one["request"]), one["seed"]) for one in added))
        report.requests += len(added)
    elif kind == "cancel":
        scheduler.cancel(RequestId(event["id"]), event["reason"])
    elif kind == "finish":
        scheduler.finish(RequestId(event["id"]), event["num_tokens"])
    elif kind == "fail_request":
        scheduler.fail_request(RequestId(event["id"]), _failure_from(event["failure"]))
    elif kind == "plan":
        plan = scheduler.schedule()
        planned = None if plan is None else json.loads(json.dumps(describe(plan)))
        if planned != event["plan"]:
            raise ReplayDifference(f"planned {_difference(planned, event['plan'])}")
        if plan is not None:
            plans.append(plan)
            report.steps += 1
    elif kind == "apply":
        result = _result_from(event["result"])
        scheduler.apply(plans.pop(0), result, event["seconds"])
        report.tokens += len(result.tokens)
    elif kind == "fail":
        plans.clear()
        scheduler.fail(_result_from(event["result"]), [_result_from(r) for r in event["behind"]])
    else:
        raise ReplayDifference(f"unknown event {kind!r}")


def describe(plan: IterationPlan) -> dict[str, Any]:
    """A plan as plain values, without sampling parameters: the "add" event has them."""
    fields = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    fields["row_starts"] = [(s.row, s.request_id, len(s.tokens), s.seed, s.blocks) for s in plan.row_starts]
    return fields


def _difference(planned: dict[str, Any] | None, recorded: dict[str, Any] | None) -> str:
    if planned is None or recorded is None:
        return "nothing, but the log has a step" if planned is None else "a step, but the log has none"
    names = [name for name in recorded if planned.get(name) != recorded[name]]
    return "; ".join(f"{name} {planned.get(name)}, but the log has {recorded[name]}" for name in names)


def _plain(value: Any) -> Any:
    """Converts dataclasses, enums, sets and mappings to JSON values."""
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if f.name != "metadata"]
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return [[_plain(k), _plain(v)] for k, v in value.items()]
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _added(sequence: Sequence) -> dict[str, Any]:
    """The fields of an "add" event. Metadata is for people only: a replay ignores it, and values that JSON cannot
    represent are written as their `repr`."""
    added = {"seed": sequence.seed, "request": _plain(sequence.request)}
    if metadata := sequence.request.metadata:
        try:
            added["metadata"] = json.loads(json.dumps(dict(metadata), default=repr))
        except (TypeError, ValueError, RecursionError):
            added["metadata"] = repr(metadata)
    return added


def _scheduler_from(event: dict[str, Any], clock: Clock) -> ContinuousBatchScheduler:
    if event["event"] != "start" or event["version"] != LOG_VERSION:
        raise ReplayDifference(f"not a weft log of version {LOG_VERSION}")
    config = dict(event["config"])
    config["policy"] = PriorityPolicy(config["policy"])
    config["preemption"] = PreemptionMode(config["preemption"])
    info = dict(event["info"])
    info["eos_token_ids"] = frozenset(info["eos_token_ids"])
    clock.readings = iter(event["clock"])  # type: ignore[attr-defined]
    return ContinuousBatchScheduler(SchedulerConfig(**config), BackendInfo(**info), clock)


def _request_from(fields: dict[str, Any]) -> InferenceRequest:
    params = dict(fields["params"])
    params["logit_bias"] = dict(params["logit_bias"])
    if params.get("grammar") is not None:
        params["grammar"] = Grammar(**params["grammar"])
    rest = {name: value for name, value in fields.items() if name not in ("params", "priority")}
    return InferenceRequest(params=SamplingParams(**params), priority=Priority(fields["priority"]), **rest)


def _result_from(fields: dict[str, Any]) -> StepResult:
    return StepResult(
        tokens=fields["tokens"],
        logprobs=None if fields["logprobs"] is None else [_logprobs_from(one) for one in fields["logprobs"]],
        prompt_logprobs={
            request_id: (first, [TokenLogprobs(*one) for one in logprobs])
            for request_id, (first, logprobs) in fields["prompt_logprobs"]
        },
        errors={request_id: _failure_from(failure) for request_id, failure in fields["errors"]},
        error=fields["error"],
        finished_swaps=tuple(fields["finished_swaps"]),
        failed_swaps=dict(fields["failed_swaps"]),
    )


def _failure_from(fields: list[str]) -> Failure:
    kind, message = fields
    return Failure(FailureKind(kind), message)


def _logprobs_from(fields: list[Any] | None) -> TokenLogprobs | None:
    return None if fields is None else TokenLogprobs(*fields)
