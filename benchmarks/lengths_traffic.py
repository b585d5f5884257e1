"""Traffic of the benchmark `lengths`: short and long answers with the same `max_tokens`, and how they run through the real
engine on any clock."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

from weft.clock import Clock
from weft.engine.serving import ServingEngine
from weft.lengths import ExpectedLength, LengthDistribution, LengthFeatures, LengthPredictor
from weft.request import GenerationResult, InferenceRequest, RequestId, SamplingParams, TokenOutput
from weft.server.admission.waiting import Place, WaitEstimate

SHORT, LONG = (8, 48), (200, 600)
"""Range of the tokens of a short and of a long answer. All numbers in a range are equally likely."""
SHORT_SHARE = 0.7
CLEAR_SHARE = 0.8
"""The fraction of requests with a template that only short or only long answers have. The others share a third one."""
PROMPT = (16, 256)
MAX_TOKENS = 1024


@dataclass
class Job:
    """A request of the traffic, and the times of its tokens."""

    arrival: float
    prompt: int
    output: int
    is_long: bool
    template: int
    num_tokens: int = 0
    ended: float = 0.0
    first: float = 0.0
    given_wait: float | None = None
    """The wait in seconds that the client was given when the job was refused. None: the job was accepted at once."""
    accepted: float = 0.0

    @property
    def latency(self) -> float:
        return self.ended - self.arrival

    @property
    def features(self) -> LengthFeatures:
        return LengthFeatures("", self.template, 0, self.prompt, MAX_TOKENS)


def mean_output() -> float:
    return SHORT_SHARE * sum(SHORT) / 2 + (1 - SHORT_SHARE) * sum(LONG) / 2


def traffic(seed: int, per_second: float, count: int) -> list[Job]:
    """Requests at random times. With the same seed, another rate gives the same requests at other times."""
    source, jobs = random.Random(seed), []
    for at in accumulate(source.expovariate(1.0) for _ in range(count)):
        is_long = source.random() >= SHORT_SHARE
        template = int(is_long) if source.random() < CLEAR_SHARE else 2
        output = source.randint(*(LONG if is_long else SHORT))
        jobs.append(Job(at / per_second, source.randint(*PROMPT), output, is_long, template))
    return jobs


Expect = Callable[[Job], ExpectedLength | None]


@dataclass
class Learner:
    """Predicts the lengths of jobs, learns them at their end, and counts how often the predicted quantiles held."""

    predictor: LengthPredictor = field(default_factory=LengthPredictor)
    expected: dict[int, ExpectedLength] = field(default_factory=dict)
    num_answers: int = 0
    """This count and the two below are over all runs."""
    below_p50: int = 0
    below_p90: int = 0

    def begin(self, earlier: list[Job]) -> None:
        """Begins a new run, in which only the answers of `earlier` are known."""
        self.predictor, self.expected = LengthPredictor(), {}
        for job in earlier:
            self.learn(job)

    def expect(self, job: Job) -> ExpectedLength:
        self.expected[id(job)] = expected = self.predictor.predict(job.features).expected()
        return expected

    def learn(self, job: Job) -> None:
        self.predictor.learn(job.features, job.output, was_cut=False)
        expected = self.expected.pop(id(job), None)
        if expected is not None:
            self.num_answers += 1
            self.below_p50 += job.output <= expected.p50
            self.below_p90 += job.output <= expected.p90


class PlaceLimit:
    """Accepts at most `num_places` jobs at once. Refuses others, and accepts them in order of arrival once there is room."""

    def __init__(self, num_places: int, clock: Clock, predictor: LengthPredictor) -> None:
        self.active: dict[int, tuple[Job, LengthDistribution]] = {}
        self._num_places = num_places
        self._clock = clock
        self._predictor = predictor
        self._waits = WaitEstimate(clock, is_shortest_first=True)
        self._refused: deque[tuple[Job, float]] = deque()
        """Jobs that are not accepted yet, and when each tries again."""

    def arrive(self, job: Job) -> None:
        """Queues a job. If there is no room, it is refused, and its client is given a wait."""
        job.given_wait = None if self._has_room else self._wait_to_give()
        self._refused.append((job, self._clock() + (job.given_wait or 0.0)))

    def accepted(self) -> list[Job]:
        """Accepts jobs while there is room, and returns them."""
        found, now = [], self._clock()
        while self._refused and len(self.active) < self._num_places:
            job, _ = self._refused.popleft()
            job.accepted = now
            self._waits.accepted("")
            self.active[id(job)] = job, self._predictor.predict(job.features)
            found.append(job)
        for index, (job, back_at) in enumerate(self._refused):
            if back_at <= now:  # the job tries again now, and is refused again
                self._refused[index] = job, now + self._wait_to_give()
        return found

    def leave(self, job: Job, result: GenerationResult) -> None:
        del self.active[id(job)]
        self._waits.record(result.prefill_time, result.decode_time, job.output - 1)

    @property
    def has_waiting(self) -> bool:
        return bool(self._refused)

    @property
    def _has_room(self) -> bool:
        return not self._refused and len(self.active) < self._num_places

    def _wait_to_give(self) -> float:
        """The seconds that a client is given if it is refused now: the server's estimate until a place is free."""
        places = [Place(length, job.num_tokens) for job, length in self.active.values()]
        anyone = self._predictor.predict(LengthFeatures("", -1, 0, 1, MAX_TOKENS))
        return self._waits.seconds_until_free("", len(places), lambda: (places, anyone))


def run(
    engine: ServingEngine,
    clock: Clock,
    wait_until: Callable[[float], None],
    jobs: list[Job],
    expect: Expect,
    learn: Callable[[Job], object] = lambda job: None,
    limit: PlaceLimit | None = None,
) -> None:
    """Submits each job when it arrives, and ends its answer at its length. The clock starts at 0."""
    source, vocabulary = random.Random(0), range(min(40_000, engine.scheduler.info.vocabulary_size))
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    active: dict[RequestId, Job] = {}
    ended: deque[tuple[RequestId, Job]] = deque()

    def take(output: TokenOutput) -> None:
        job = active.get(output.request_id)
        if job is None or output.token_id is None:
            return
        job.num_tokens += 1
        if job.num_tokens == 1:
            job.first = clock()
        if job.num_tokens == job.output:
            job.ended = clock()
            del active[output.request_id]
            engine.finish(output.request_id, job.output)
            learn(job)
            if limit is not None:
                ended.append((output.request_id, job))

    def submit(job: Job) -> None:
        # Prompts without common prefixes: prefix hits would make later requests cheaper than earlier ones.
        prompt = tuple(source.choices(vocabulary, k=job.prompt))
        active[engine.submit_with_callback(InferenceRequest(prompt, params, expected=expect(job)), take)] = (
            job
        )

    pending = deque(jobs)
    while pending or engine.has_work or active or (limit is not None and limit.has_waiting):
        while ended and limit is not None and (result := engine.get_result(ended[0][0])) is not None:
            limit.leave(ended.popleft()[1], result)
        while pending and pending[0].arrival <= clock():
            job = pending.popleft()
            if limit is None:
                submit(job)
            else:
                limit.arrive(job)
        for job in limit.accepted() if limit is not None else ():
            submit(job)
        if engine.has_work:
            engine.run_iteration()
        elif pending:
            wait_until(pending[0].arrival)
    engine.stop()
    assert all(job.num_tokens == job.output for job in jobs), "a job did not get all its tokens"
