"""`python -m benchmarks schema-drafts`: answers under schemas, with and without draft tokens.

Two engines run the same model, one of them without draft tokens. They get the same requests in turn, alone and in waves
of 8 and of 32, whose answers have different schemas. Each answer must be complete, must follow its schema (pydantic
checks it), and must be the same without draft tokens, token for token.

`--keep` appends the figures of each wave to a file. A later run continues there, so that many answers can be measured in
pieces.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from weft.bench.ratios import Ratios
from weft.bench.report import Check, machine, print_checks, print_json, print_line, print_table
from weft.llm import LLM
from weft.request import FinishReason, GenerationResult, Grammar, SamplingParams

STREAMS = (1, 8, 32)
ROUND = (*[1] * 32, *[8] * 4, 32)
"""The waves of a round: as many answers alone as in waves of 8 and in waves of 32."""
MAX_TOKENS = 600
"""More than any answer needs: strings and arrays of all schemas are short."""
BARS = {1: 1.0, 8: 0.98, 32: 0.98}
"""Number of streams -> required speed with draft tokens, relative to that without."""
LONG_NAMES = "long names"
LONG_NAMES_BAR = 1.2
"""The required relative speed of one stream for the schema whose property names are long."""
WORDS = [
    "harbour",
    "lighthouse",
    "train",
    "garden",
    "winter",
    "river",
    "teacher",
    "market",
    "violin",
    "bridge",
    "island",
    "library",
]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Customer(_Closed):
    customer_identification_number: int = Field(ge=0, le=9999)
    preferred_contact_method: Literal["email", "telephone", "postal_service"]
    is_subscribed_to_newsletter: bool
    date_of_first_purchase: str = Field(pattern="^[0-9]{4}-[0-9]{2}$")
    favourite_product_category: Literal["books", "garden", "kitchen"]


class _Place(_Closed):
    name: str = Field(max_length=16)
    country: str = Field(max_length=16)


class _Weather(_Closed):
    sky: Literal["clear", "cloudy", "overcast", "foggy"]
    degrees: int = Field(ge=-40, le=50)
    wind: float | None = Field(ge=0, le=200)


class _Item(_Closed):
    part_number: int = Field(ge=0, le=99)
    is_available: bool


class _Order(_Closed):
    order_items: list[_Item] = Field(min_length=1, max_length=3)


SCHEMAS: dict[str, TypeAdapter[Any]] = {
    LONG_NAMES: TypeAdapter(_Customer),
    "two strings": TypeAdapter(_Place),
    "numbers": TypeAdapter(_Weather),
    "array of objects": TypeAdapter(_Order),
    "enum": TypeAdapter(Literal["certainly", "probably", "probably not", "certainly not"]),
    "integer": TypeAdapter(Annotated[int, Field(ge=0, le=120)]),
    "list of words": TypeAdapter(Annotated[list[Literal["red", "green", "blue"]], Field(max_length=4)]),
    "string": TypeAdapter(Annotated[str, Field(max_length=20)]),
}


@dataclass(frozen=True)
class Wave:
    """The figures of answers that ran together."""

    streams: int
    schema: str
    """Of one answer alone. "": the answers have different schemas."""
    tokens: int
    seconds_without: float
    seconds_with: float
    drafted: int
    accepted: int
    num_answers: int
    invalid: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)


def main(
    model: str = "default",
    *,
    answers: int = 96,
    learned: bool = True,
    keep: Path | None = None,
    as_json: bool = False,
) -> bool:
    """Measures and prints. Returns False if an answer is invalid or differs, or if a bar is missed."""
    waves = [] if keep is None or not keep.exists() else _read(keep)
    options: dict[str, Any] = {} if learned else {"max_learned_bytes": 0}
    with LLM(model, **options) as drafting, LLM(model, max_draft_tokens=0) as bare:
        for wave in measure(drafting, bare, sum(wave.num_answers for wave in waves), answers):
            waves.append(wave)
            if keep is not None:
                with keep.open("a") as file:
                    file.write(json.dumps(asdict(wave)) + "\n")
    found = checks(waves)
    if as_json:
        print_json({"machine": machine(), "rows": [_row(*one) for one in _parts(waves)], "checks": found})
    else:
        print_table(
            "Answers under schemas, tokens/s without and with draft tokens",
            ("streams", "schema", "answers", "tokens", "without", "with", "times", "drafts", "accepted"),
            [_row(*one) for one in _parts(waves)],
        )
        print_checks(found)
        print_line(machine())
    return all(check.is_met for check in found)


def measure(drafting: LLM, bare: LLM, first: int, end: int) -> Iterator[Wave]:
    """Asks for answers `first` to `end`, in whole waves."""
    if first < end:
        for llm in (drafting, bare):
            for number in range(len(SCHEMAS)):
                _ask(llm, range(number, number + 1))  # compiles the grammar
    number = 0
    while number < end:
        for streams in ROUND:
            numbers = range(number, number + streams)
            if number >= first and number < end:
                yield _measure(drafting, bare, numbers)
            number += streams


def _measure(drafting: LLM, bare: LLM, numbers: range) -> Wave:
    """Sends a wave to both engines. Which engine is first alternates."""
    stats = drafting.engine.scheduler.stats
    drafted, accepted = stats.tokens_drafted, stats.drafts_accepted
    answers: dict[LLM, list[GenerationResult]] = {}
    seconds: dict[LLM, float] = {}
    for llm in (drafting, bare) if numbers[0] // len(numbers) % 2 else (bare, drafting):
        answers[llm], seconds[llm] = _ask(llm, numbers)
    invalid, different = [], []
    for number, one, other in zip(numbers, answers[drafting], answers[bare], strict=True):
        if (error := check_answer(number, one)) is not None:
            invalid.append(f"answer {number}: {error}")
        if (one.tokens, one.finish_reason) != (other.tokens, other.finish_reason):
            different.append(f"answer {number}: {one.text!r}, without draft tokens {other.text!r}")
    return Wave(
        len(numbers),
        _name(numbers[0]) if len(numbers) == 1 else "",
        sum(len(one.tokens) for one in answers[drafting]),
        seconds[bare],
        seconds[drafting],
        stats.tokens_drafted - drafted,
        stats.drafts_accepted - accepted,
        len(numbers),
        invalid,
        different,
    )


def check_answer(number: int, answer: GenerationResult) -> str | None:
    """Why an answer is not complete or does not follow its schema."""
    if answer.finish_reason is not FinishReason.END_OF_SEQUENCE:
        return f"it ended by {answer.finish_reason.value}: {answer.error or answer.text!r}"
    try:
        SCHEMAS[_name(number)].validate_json(answer.text, strict=True)
    except ValidationError as error:
        return f"{error}: {answer.text!r}"
    return None


def _ask(llm: LLM, numbers: range) -> tuple[list[GenerationResult], float]:
    """The answers to a wave, and the seconds that they took. For one answer: the seconds after its first token."""
    prompts = [llm.text.encode_chat([{"role": "user", "content": _question(number)}]) for number in numbers]
    params = [
        SamplingParams(
            max_tokens=MAX_TOKENS,
            temperature=0.8 * (number // len(SCHEMAS) % 2),
            seed=number,
            grammar=Grammar("json_schema", json.dumps(SCHEMAS[_name(number)].json_schema())),
        )
        for number in numbers
    ]
    started = time.perf_counter()
    answers = llm.generate(prompts, params, show_progress=False)
    took = time.perf_counter() - started
    return answers, took if len(numbers) > 1 else answers[0].decode_time


def _name(number: int) -> str:
    return list(SCHEMAS)[number % len(SCHEMAS)]


def _question(number: int) -> str:
    """A question that no other answer has."""
    one, two = WORDS[number % len(WORDS)], WORDS[number // len(WORDS) % len(WORDS)]
    return f"Case {number}: answer as JSON about a {one} and a {two}."


# ---------------------------------------------------------------------- the figures


def _read(keep: Path) -> list[Wave]:
    return [Wave(**json.loads(line)) for line in keep.read_text().splitlines()]


def _parts(waves: list[Wave]) -> list[tuple[int, str, list[Wave]]]:
    """The waves by streams and schema. Only answers alone have one schema."""
    found = [(1, name, [w for w in waves if w.schema == name]) for name in SCHEMAS]
    found += [(streams, "all", [w for w in waves if w.streams == streams]) for streams in STREAMS]
    return [part for part in found if part[2]]


def _times(waves: list[Wave]) -> tuple[float, float, float]:
    """How many times as fast the engine with draft tokens was, with the 95% interval. An answer of one token has no time
    after it."""
    timed = [wave for wave in waves if min(wave.seconds_with, wave.seconds_without) > 0]
    if not timed:
        return 1.0, 0.0, 0.0
    change = Ratios([w.seconds_with for w in timed], [w.seconds_without for w in timed]).change()
    return 1 + change[0], 1 + change[1], 1 + change[2]


def _row(streams: int, name: str, waves: list[Wave]) -> tuple[str, ...]:
    tokens, drafted = sum(w.tokens for w in waves), sum(w.drafted for w in waves)
    times, low, high = _times(waves)
    return (
        str(streams),
        name,
        f"{sum(w.num_answers for w in waves):,}",
        f"{tokens:,}",
        f"{tokens / max(1e-9, sum(w.seconds_without for w in waves)):.0f}",
        f"{tokens / max(1e-9, sum(w.seconds_with for w in waves)):.0f}",
        f"{times:.2f} [{low:.2f}, {high:.2f}]",
        f"{drafted:,}",
        f"{sum(w.accepted for w in waves) / max(1, drafted):.0%}",
    )


def checks(waves: list[Wave]) -> list[Check]:
    total = sum(wave.num_answers for wave in waves)
    found = []
    for name, bad in (
        ("follow their schema", [one for wave in waves for one in wave.invalid]),
        ("equal those without draft tokens", [one for wave in waves for one in wave.different]),
    ):
        measured = f"{total - len(bad):,} of {total:,}" + (f"; {bad[0]}" if bad else "")
        found.append(Check(f"answers that {name}", measured, "all", not bad))
    bars = [(streams, "all", bar) for streams, bar in BARS.items()] + [(1, LONG_NAMES, LONG_NAMES_BAR)]
    for streams, name, bar in bars:
        for part in _parts(waves):
            if part[:2] == (streams, name):
                times, low, high = _times(part[2])
                text = f"{times:.2f} times [{low:.2f}, {high:.2f}]"
                found.append(Check(f"streams: {streams}, {name}", text, f"{bar} times", times >= bar))
    return found
