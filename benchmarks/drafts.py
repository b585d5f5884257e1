"""`python -m benchmarks drafts`: the speedup of one stream by draft tokens, for several kinds of prompts.

Two engines run the same model, one of them without draft tokens. They answer every prompt in turn, since the speed of a
shared machine changes from minute to minute. Only the time after the first token counts: prefill has no draft tokens.
Both engines must give the same answers, token for token.

`--predictions` measures something else: one engine answers the same prompts without a prediction and with wrong ones,
in turn. Each round gives one ratio of the whole times; the table shows the geometric mean of these ratios with its 95%
interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from weft.bench.ratios import Ratios
from weft.bench.report import Check, machine, print_checks, print_json, print_line, print_table
from weft.llm import LLM
from weft.request import GenerationResult, InferenceRequest, SamplingParams

TEMPERATURES = (0.0, 0.8)
ROUNDS = 2
MAX_TOKENS = 160

_CODE = """\
def area(shape):
    if shape.kind == "circle":
        return 3.14159 * shape.radius ** 2
    if shape.kind == "square":
        return shape.side ** 2
    if shape.kind == "rectangle":
        return shape.width * shape.height
    raise ValueError(shape.kind)
"""
_TEXT = (
    "The harbour was quiet that morning. Fishing boats lay side by side along the wall, and gulls walked on the nets that had "
    "been hung up to dry. Old Martin sat on a box in front of the ice house and mended what the crabs had torn. He had done "
    "that every day for thirty years, and he did not look up when the ferry came in."
)

PROMPTS = {
    "short questions": (
        "What is the capital of Japan?",
        "Why is the sky blue?",
        "How do plants make food?",
        "Who wrote Hamlet?",
        "What is a black hole?",
        "How does a bicycle stay upright?",
    ),
    "free writing": (
        "Write a short story about a lighthouse keeper.",
        "Write a letter to a friend about a trip to the mountains.",
        "Explain how to bake bread to a child.",
        "Describe a city of the future.",
    ),
    "lists and tables": (
        "List the numbers from 1 to 40 in words.",
        "Write a table of countries and their capitals in Markdown with 12 rows.",
        "Write ten JSON objects with name, age and city.",
    ),
    "code": (
        f"Rename the function area to compute_area and give back the whole code:\n{_CODE}",
        f"Add type hints to this code and print all of it:\n{_CODE}",
        "Write a Python class for a bank account with deposit, withdraw and balance.",
    ),
    "text at hand": (
        f"Correct the spelling of this text and repeat it:\n{_TEXT}",
        f"Repeat this text in capital letters:\n{_TEXT}",
        f"Summarise this text in three sentences:\n{_TEXT}",
    ),
}


@dataclass(frozen=True)
class Gain:
    """The result of one kind of prompt at one temperature."""

    kind: str
    temperature: float
    tokens: int
    """Number of tokens after the first one of each answer."""
    seconds_without: float
    seconds_with: float
    drafted: int
    accepted: int
    is_same: bool

    @property
    def ratio(self) -> float:
        return self.seconds_without / self.seconds_with


def main(model: str = "default", rounds: int = ROUNDS, json: bool = False) -> bool:
    """Measures and prints. Returns False if an answer differs with draft tokens."""
    with LLM(model) as with_drafts, LLM(model, max_draft_tokens=0) as without_drafts:
        gains = [
            measure(with_drafts, without_drafts, kind, prompts, temperature, rounds)
            for temperature in TEMPERATURES
            for kind, prompts in PROMPTS.items()
        ]
    is_same = all(gain.is_same for gain in gains)
    check = Check("answers with drafts", "the same" if is_same else "some differ", "token for token", is_same)
    if json:
        print_json({"machine": machine(), "gains": gains, "checks": [check]})
        return is_same
    print_table(
        f"One stream without and with drafts, tokens/s after the first ({rounds} rounds)",
        ("prompts", "temperature", "tokens", "without", "with", "ratio", "drafts per token", "accepted"),
        [_row(gain) for gain in gains],
    )
    print_checks([check])
    print_line(machine())
    return is_same


def measure(
    with_drafts: LLM,
    without_drafts: LLM,
    kind: str,
    prompts: tuple[str, ...],
    temperature: float,
    rounds: int,
) -> Gain:
    """Sends every prompt to both engines. Which engine is first alternates by round."""
    stats = with_drafts.engine.scheduler.stats
    drafted, accepted = stats.tokens_drafted, stats.drafts_accepted
    seconds = {with_drafts: 0.0, without_drafts: 0.0}
    tokens, is_same = 0, True
    for number in range(rounds):
        for prompt in prompts:
            answers: dict[LLM, GenerationResult] = {}
            for llm in (with_drafts, without_drafts) if number % 2 else (without_drafts, with_drafts):
                params = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=number)
                answers[llm] = llm.chat([{"role": "user", "content": prompt}], params)
                seconds[llm] += answers[llm].decode_time
            tokens += answers[with_drafts].decode_steps
            is_same = is_same and answers[with_drafts].tokens == answers[without_drafts].tokens
    return Gain(
        kind,
        temperature,
        tokens,
        seconds[without_drafts],
        seconds[with_drafts],
        stats.tokens_drafted - drafted,
        stats.drafts_accepted - accepted,
        is_same,
    )


def _row(gain: Gain) -> tuple[Any, ...]:
    return (
        gain.kind,
        f"{gain.temperature:g}",
        f"{gain.tokens:,}",
        f"{gain.tokens / gain.seconds_without:.0f}",
        f"{gain.tokens / gain.seconds_with:.0f}",
        f"{gain.ratio:.2f}",
        f"{gain.drafted / max(1, gain.tokens):.2f}",
        f"{gain.accepted / max(1, gain.drafted):.0%}",
    )


# ---------------------------------------------------------------------- wrong predictions

_NO_PREDICTION = "none"
_WRONG_TOKENS = 8


@dataclass(frozen=True)
class WrongPrediction:
    """The whole times of an answer without a prediction and with a wrong one, in seconds, for each round."""

    kind: str
    without: list[float]
    with_it: list[float]
    rejected: int
    """Draft tokens from the prediction that were rejected."""
    is_same: bool

    @property
    def change(self) -> tuple[float, float, float]:
        return Ratios(self.without, self.with_it).change()


def main_predictions(model: str = "default", rounds: int = ROUNDS, json: bool = False) -> bool:
    """Measures and prints. Returns False if an answer differs with a prediction."""
    # `max_learned_bytes=0`: no draft tokens from finished answers. Otherwise each answer would get draft tokens from
    # the same answer of the previous round.
    with LLM(model, max_learned_bytes=0) as llm:
        found = measure_predictions(llm, [prompts[0] for prompts in PROMPTS.values()], rounds)
    is_same = all(one.is_same for one in found)
    if json:
        print_json({"machine": machine(), "predictions": found, "changes": [one.change for one in found]})
        return is_same
    print_table(
        f"Answers of {MAX_TOKENS} tokens with a wrong prediction, seconds ({rounds} rounds)",
        ("prediction", "without", "with", "change, 95% interval", "rejected drafts", "answers"),
        [
            (
                one.kind,
                f"{median(one.without):.2f}",
                f"{median(one.with_it):.2f}",
                "{:+.1%} [{:+.1%}, {:+.1%}]".format(*one.change),
                f"{one.rejected:,}",
                "the same" if one.is_same else "some differ",
            )
            for one in found
        ],
    )
    print_line(machine())
    return is_same


def measure_predictions(llm: LLM, prompts: list[str], rounds: int) -> list[WrongPrediction]:
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
    requests = [InferenceRequest(tuple(llm.text.encode_chat(one)), params) for one in messages]
    # These runs are also the warm-up: from here on, every prompt is a prefix hit.
    answers = [_answer(llm, request)[0].tokens for request in requests]
    other = tuple(llm.tokenizer.encode("Quite another text about fish and chips. " * 20))
    predictions: dict[str, list[tuple[int, ...]]] = {
        _NO_PREDICTION: [()] * len(requests),
        "another text": [other] * len(requests),
        "all drafts wrong": [_misleading(one, llm.tokenizer.vocabulary_size) for one in answers],
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in predictions}
    rejected, is_same = dict.fromkeys(predictions, 0), dict.fromkeys(predictions, True)
    for number in range(rounds):
        for kind in predictions:
            seconds[kind].append(0.0)
        kinds = list(predictions)
        kinds = kinds[number % len(kinds) :] + kinds[: number % len(kinds)]
        for index, request in enumerate(requests):
            for kind in kinds:
                result, elapsed = _answer(llm, request.replaced(prediction=predictions[kind][index]))
                seconds[kind][-1] += elapsed
                rejected[kind] += result.rejected_prediction_count
                is_same[kind] = is_same[kind] and result.tokens == answers[index]
    without = seconds.pop(_NO_PREDICTION)
    return [
        WrongPrediction(kind, without, times, rejected[kind], is_same[kind])
        for kind, times in seconds.items()
    ]


def _misleading(answer: tuple[int, ...], vocabulary_size: int) -> tuple[int, ...]:
    """A prediction that has every pair of tokens of the answer, each followed by wrong ones."""
    found: list[int] = []
    for index in range(len(answer) - 1):
        following = answer[index + 2] if index + 2 < len(answer) else 0
        found += (*answer[index : index + 2], *[(following + 1) % vocabulary_size] * _WRONG_TOKENS)
    return tuple(found)


def _answer(llm: LLM, request: InferenceRequest) -> tuple[GenerationResult, float]:
    begin = perf_counter()
    request_id = llm.engine.submit(request.replaced(request_id=llm.engine.new_id()))
    result = llm.engine.get_result(request_id, wait=600.0)
    assert result is not None, "the engine did not answer within ten minutes"
    return result, perf_counter() - begin
