"""Records a run of the scheduler in an event log, and replays it.

The scheduler is deterministic: the requests, cancels, results and clock readings that it gets determine its plans. The
log contains these inputs and the plans, in order, one JSON object per line. A replay passes the inputs to a new
scheduler and compares its plans with those of the log.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import IO, Any

from weft import __version__
from weft.clock import Clock
from weft.config import PreemptionMode, PriorityPolicy, SchedulerConfig
from weft.engine.event_log import EventLog
from weft.errors import WeftError
from weft.learned_costs import LearnedCosts
from weft.lengths import ExpectedLength
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

LOG_VERSION = 8
_MAX_START_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 30
"""Maximum lengths of the first line and of the others: a file that is no log may be a single endless line."""

Event = dict[str, Any]
"""An event: the JSON object of one line of the log."""


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


_NOT_REPLAYED = ("metadata", "vectors", "waited")
"""Fields that no plan depends on."""


class _ReplayClock:
    """Returns the clock readings of the log."""

    def __init__(self) -> None:
        self.now = 0.0
        self.was_read = False
        self._readings: Iterator[float] = iter(())

    def begin(self, readings: Iterable[float]) -> None:
        """Begins an event, which has these clock readings."""
        self._readings = iter(readings)

    def __call__(self) -> float:
        try:
            self.now, self.was_read = next(self._readings), True
        except StopIteration:
            raise ReplayDifference("the clock is read more often than in the recorded run") from None
        return self.now

    def end(self) -> None:
        """Ends an event. Raises ReplayDifference if it has not used all its readings."""
        if next(self._readings, None) is not None:
            raise ReplayDifference("the clock is read less often than in the recorded run")


class ReplayDifference(WeftError):
    """The replay differs from its log."""


class UnreadableLogError(ReplayDifference):
    """The file is no event log that this version can replay."""

    exit_code = 2


class _RecordingScheduler(ContinuousBatchScheduler):
    """The scheduler, logging every call that changes its state."""

    def __init__(
        self, config: SchedulerConfig, info: BackendInfo, clock: _ReadingsClock, log: EventLog
    ) -> None:
        super().__init__(config, info, clock)
        self._log = log
        self._readings = clock
        self._write("start", version=LOG_VERSION, weft=__version__, config=_plain(config), info=_plain(info))

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

    def drop_deadline(self, request_id: RequestId) -> bool:
        done = super().drop_deadline(request_id)
        if done:
            self._write("drop_deadline", id=request_id)
        return done

    def fail_request(self, request_id: RequestId, failure: Failure) -> bool:
        done = super().fail_request(request_id, failure)
        if done:
            self._write("fail_request", id=request_id, failure=_plain(failure))
        return done

    def restore_costs(self, costs: LearnedCosts) -> None:
        super().restore_costs(costs)
        self._write("restore_costs", costs=_plain(costs))

    def forget_answers(self) -> None:
        super().forget_answers()
        self._write("forget_answers")

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


class LogReplay:
    """Passes the events of a log to a new scheduler, in order, and compares its plans with those of the log.

    The constructor reads the first line. A file that cannot be replayed at all is an UnreadableLogError.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.report = ReplayReport()
        self._clock = _ReplayClock()
        self._plans: list[IterationPlan] = []
        self._lines = 1
        self._file = _open_log(path)
        try:
            self._size = os.fstat(self._file.fileno()).st_size
            self.scheduler = self._start()
        except BaseException:
            self._file.close()
            raise

    @property
    def now(self) -> float:
        """The newest clock reading of the recorded run."""
        return self._clock.now

    @property
    def has_time(self) -> bool:
        """Whether an event had a clock reading. Before the first one, `now` is 0."""
        return self._clock.was_read

    @property
    def progress(self) -> float:
        """The part of the file that was read, from 0 to 1."""
        return min(1.0, self._bytes_read / self._size) if self._size else 0.0

    def events(self) -> Iterator[Event]:
        """Replays the log, and yields each event after it was replayed. The caller must take the outputs of the
        scheduler, or they fill the memory. Raises ReplayDifference, with the line number, if a plan differs from the recorded one."""
        with self._file:
            while line := self._file.readline(_MAX_LINE_BYTES):
                self._lines += 1
                self._bytes_read += len(line)
                if not line.endswith(b"\n"):
                    if len(line) == _MAX_LINE_BYTES:
                        raise ReplayDifference(
                            f"{self._where}: the line is longer than {_MAX_LINE_BYTES} bytes"
                        )
                    self.report.is_cut = True
                    return
                yield self._replay(line)

    def close(self) -> None:
        self._file.close()

    @property
    def _where(self) -> str:
        return f"{self.path}, line {self._lines}"

    def _start(self) -> ContinuousBatchScheduler:
        line = self._file.readline(_MAX_START_BYTES)
        self._bytes_read = len(line)
        if not line:
            raise UnreadableLogError(f"{self.path} is empty: not a weft log")
        try:
            event = json.loads(line)
            is_log = event["event"] == "start"
            version = event["version"]
        except (ValueError, KeyError, TypeError, RecursionError):
            is_log = False
        if not is_log:
            raise UnreadableLogError(
                f"{self._where}: not a weft log, or cut in its first line; engines write logs to log_path"
            )
        if version != LOG_VERSION:
            weft = event.get("weft", "another version")
            raise UnreadableLogError(
                f"{self._where}: the log has version {version!r:.40}, of weft {weft!s:.40}; weft {__version__} replays "
                f"version {LOG_VERSION}. Replay it with the weft that wrote it"
            )
        self._weft = str(event.get("weft", ""))
        with self._errors_as_differences(UnreadableLogError):
            self._clock.begin(event["clock"])
            return _scheduler_from(event, self._clock)

    def _replay(self, line: bytes) -> Event:
        try:
            event: Event = json.loads(line)
            self._clock.begin(event["clock"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ReplayDifference(f"{self._where}: not a weft log, or cut short ({error})") from error
        with self._errors_as_differences(ReplayDifference):
            _replay_event(self.scheduler, event, self._plans, self.report)
            self._clock.end()
        return event

    @contextmanager
    def _errors_as_differences(self, kind: type[ReplayDifference]) -> Iterator[None]:
        """Turns each error into a `kind`. Adds the line of the log, and the version of weft that wrote the log if it is
        another one."""
        is_other = self._weft not in ("", __version__)
        hint = f". Weft {self._weft:.40} wrote the log; this is weft {__version__}" if is_other else ""
        try:
            yield
        except WeftError as error:
            raise kind(f"{self._where}: {error}{hint}") from None
        except Exception as error:
            message = f"{self._where}: cannot be replayed ({type(error).__name__}: {error}){hint}"
            raise kind(message) from error


def replay(path: str) -> ReplayReport:
    """Replays a log. Raises ReplayDifference, with the line number, if a plan differs from the recorded one."""
    log = LogReplay(path)
    for _ in log.events():
        log.scheduler.take_outputs()
        log.scheduler.tokens.token_gaps.clear()
        log.scheduler.tokens.first_token_times.clear()
    return log.report


def _open_log(path: str) -> IO[bytes]:
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise UnreadableLogError(f"{path} cannot be read: {error.strerror or error}") from error


def _replay_event(
    scheduler: ContinuousBatchScheduler, event: Event, plans: list[IterationPlan], report: ReplayReport
) -> None:
    """Passes one event to the scheduler, and compares its plan with the log. `plans` are the plans in flight."""
    kind = event["event"]
    if kind == "add":
        added = event["requests"]
        scheduler.add(*(Sequence(_request_from(one["request"]), one["seed"]) for one in added))
        report.requests += len(added)
    elif kind == "cancel":
        scheduler.cancel(RequestId(event["id"]), event["reason"])
    elif kind == "finish":
        scheduler.finish(RequestId(event["id"]), event["num_tokens"])
    elif kind == "drop_deadline":
        scheduler.drop_deadline(RequestId(event["id"]))
    elif kind == "fail_request":
        scheduler.fail_request(RequestId(event["id"]), _failure_from(event["failure"]))
    elif kind == "restore_costs":
        scheduler.restore_costs(LearnedCosts.of(**event["costs"]))
    elif kind == "forget_answers":
        scheduler.forget_answers()
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
        names = [f.name for f in dataclasses.fields(value) if f.name not in _NOT_REPLAYED]
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


def _scheduler_from(event: Event, clock: Clock) -> ContinuousBatchScheduler:
    config = dict(event["config"])
    config["policy"] = PriorityPolicy(config["policy"])
    config["preemption"] = PreemptionMode(config["preemption"])
    info = dict(event["info"])
    info["eos_token_ids"] = frozenset(info["eos_token_ids"])
    return ContinuousBatchScheduler(SchedulerConfig(**config), BackendInfo(**info), clock)


def _request_from(fields: dict[str, Any]) -> InferenceRequest:
    params = dict(fields["params"])
    params["logit_bias"] = dict(params["logit_bias"])
    if params.get("grammar") is not None:
        params["grammar"] = Grammar(**params["grammar"])
    rest = {name: value for name, value in fields.items() if name not in ("params", "priority")}
    if rest.get("expected") is not None:
        rest["expected"] = ExpectedLength(**rest["expected"])
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
        forced={request_id: tuple(tokens) for request_id, tokens in fields["forced"]},
    )


def _failure_from(fields: list[str]) -> Failure:
    kind, message = fields
    return Failure(FailureKind(kind), message)


def _logprobs_from(fields: list[Any] | None) -> TokenLogprobs | None:
    return None if fields is None else TokenLogprobs(*fields)
