"""LLM beyond one text: several answers, logprobs, jobs under back-pressure, defaults, sessions, memory."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.errors import EngineStoppedError, InvalidRequestError, WeftError
from weft.llm import LLM, PromptJob
from weft.request import GenerationResult, InferenceRequest, RequestState, SamplingParams

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
CAPITAL = "The capital of France is"
QUESTION = [{"role": "user", "content": "Name the capital of France."}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_blocks=256, max_running=4) as opened:
        yield opened


def test_several_answers_are_the_choices_of_one_result(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, temperature=1.5, seed=7, n=3)
    single = SamplingParams(max_tokens=5, temperature=1.5, seed=7)
    first, second = llm.generate([CAPITAL, "1, 2, 3,"], params)
    assert len(first.choices) == len(second.choices) == 3
    assert len({choice.tokens for choice in first.choices}) > 1
    assert all(choice.text == llm.tokenizer.decode(choice.tokens) for choice in first.choices)
    assert first.tokens == llm.generate(CAPITAL, single)[0].tokens, "the first answer keeps the seed"


def test_logprobs_tell_the_likeliest_tokens_and_their_order(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=5, prompt_logprobs=2)
    result = llm.generate(CAPITAL, params)[0]
    assert result.logprobs is not None and len(result.logprobs) == 3
    for token, told in zip(result.tokens, result.logprobs, strict=True):
        assert told.top[0] == (token, told.logprob), "greedy takes the likeliest"
        assert [value for _, value in told.top] == sorted((value for _, value in told.top), reverse=True)
        assert sum(np.exp(value) for _, value in told.top) <= 1.0
    assert result.prompt_logprobs is not None and len(result.prompt_logprobs) == result.prompt_token_count
    assert result.prompt_logprobs[0] is None
    assert all(one is not None and len(one.top) == 2 for one in result.prompt_logprobs[1:])


def test_token_ids_are_a_prompt_too(llm: LLM) -> None:
    ids = llm.tokenizer.encode(CAPITAL)
    results = [llm.generate(ids, GREEDY), llm.generate([ids], GREEDY), llm.generate(CAPITAL, GREEDY)]
    assert len({result[0].tokens for result in results}) == 1 and all(len(r) == 1 for r in results)


def test_several_conversations_are_answered_as_one_batch(llm: LLM) -> None:
    other = [{"role": "user", "content": "Say hello."}]
    together = llm.chat_all([QUESTION, other], GREEDY)
    assert [r.tokens for r in together] == [llm.chat(QUESTION, GREEDY).tokens, llm.chat(other, GREEDY).tokens]


# --- jobs -------------------------------------------------------------------------------------------------------


def test_a_bad_job_is_answered_with_its_error_and_the_others_with_their_results(llm: LLM) -> None:
    jobs = [
        PromptJob(CAPITAL, params=GREEDY, key="good"),
        PromptJob("word " * 6000, params=GREEDY, key="long"),
        PromptJob(params=GREEDY, key="empty"),
        PromptJob(messages=[], params=GREEDY, key="silent"),
        PromptJob(messages=QUESTION, params=GREEDY, key="chat"),
        PromptJob(CAPITAL, params=SamplingParams(logit_bias={10**6: 1.0}), key="bias"),
        PromptJob(7, params=GREEDY, key="number"),  # type: ignore[arg-type]
    ]
    outcomes = {job.key: result for job, result in llm.run(jobs)}
    assert isinstance(outcomes["long"], InvalidRequestError)
    assert outcomes["long"].code == "context_length_exceeded"
    for key in ("empty", "silent", "bias", "number"):
        assert isinstance(outcomes[key], WeftError), key
    for key in ("good", "chat"):
        result = outcomes[key]
        assert isinstance(result, GenerationResult) and result.state is RequestState.COMPLETED


def test_something_that_is_no_job_is_answered_with_an_error(llm: LLM) -> None:
    outcomes = [result for _, result in llm.run([None, PromptJob(CAPITAL, params=GREEDY)])]  # type: ignore[list-item]
    assert sorted(type(outcome).__name__ for outcome in outcomes) == [
        "GenerationResult",
        "InvalidRequestError",
    ]


def test_the_token_that_ends_an_answer_is_no_part_of_its_text(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the vocabulary calls it plain text, as some files do."""
    monkeypatch.setattr(llm.tokenizer, "control_ids", frozenset())
    end = min(llm.engine.scheduler.info.eos_token_ids)
    result = llm.generate(CAPITAL, SamplingParams(max_tokens=5, temperature=0.0, logit_bias={end: 100.0}))[0]
    assert (result.tokens, result.text) == ((end,), "")


def test_a_model_nobody_refers_to_any_more_is_stopped() -> None:
    forgotten = LLM(num_blocks=64, max_running=2)
    forgotten.generate(CAPITAL, GREEDY)
    engine, name = forgotten.engine, "weft-engine"
    running = [thread for thread in threading.enumerate() if thread.name == name]
    del forgotten
    gc.collect()
    with pytest.raises(EngineStoppedError):
        engine.submit(InferenceRequest((1,)))
    assert len([thread for thread in threading.enumerate() if thread.name == name]) < len(running)


def test_jobs_are_taken_only_as_fast_as_they_are_done(llm: LLM) -> None:
    taken = []

    def endless() -> Iterator[PromptJob]:
        for number in itertools.count():
            taken.append(number)
            yield PromptJob(f"Number {number} is", params=SamplingParams(max_tokens=1), key=number)

    outcomes = llm.run(endless())
    done = [next(outcomes)[0].key for _ in range(20)]
    outcomes.close()  # type: ignore[attr-defined]
    assert len(set(done)) == 20
    assert len(taken) <= 20 + 4 * 4 + 1, "the source is not read ahead of the work"
    llm.generate(CAPITAL, GREEDY)
    assert llm.engine.metrics().requests_running == 0, "leaving the loop cancels the rest"


def test_answers_come_out_while_the_next_job_is_awaited(llm: LLM) -> None:
    answered = threading.Event()

    def slowly() -> Iterator[PromptJob]:
        yield PromptJob(CAPITAL, params=GREEDY, key=0)
        assert answered.wait(60), "the first answer is not given out before the second job is here"
        yield PromptJob(CAPITAL, params=GREEDY, key=1)

    keys = []
    for job, _ in llm.run(slowly()):
        keys.append(job.key)
        answered.set()
    assert keys == [0, 1]


def test_what_the_source_of_jobs_raises_is_raised_and_ends_the_rest(llm: LLM) -> None:
    def broken() -> Iterator[PromptJob]:
        yield PromptJob(CAPITAL, params=SamplingParams(max_tokens=200, ignore_eos=True))
        raise ZeroDivisionError("planted")

    with pytest.raises(ZeroDivisionError):
        list(llm.run(broken()))
    llm.generate(CAPITAL, GREEDY)
    assert llm.engine.metrics().requests_running == 0


def test_a_stream_that_is_left_gives_the_result_of_what_there_was(llm: LLM) -> None:
    results: list[GenerationResult] = []
    stream = llm.stream(CAPITAL, SamplingParams(max_tokens=4000, ignore_eos=True), on_result=results.append)
    next(stream)
    stream.close()
    assert [result.state for result in results] == [RequestState.CANCELLED]
    assert results[0].text.startswith(" ") and results[0].tokens


def test_generate_refuses_a_prompt_that_can_never_run_before_any_runs(llm: LLM) -> None:
    before = llm.engine.stats()[0].prompt_tokens
    with pytest.raises(InvalidRequestError, match="allowed: at most"):
        llm.generate([CAPITAL] * 8 + ["word " * 6000], GREEDY)
    assert llm.engine.stats()[0].prompt_tokens == before


# --- defaults, sessions, memory ---------------------------------------------------------------------------------


def test_defaults_are_the_models_own_and_chat_may_fill_the_context(llm: LLM) -> None:
    assert llm.default_params() == SamplingParams(max_tokens=16)
    assert llm.default_params(chat=True).max_tokens is None
    llm.suggestions = {"temperature": 0.6, "top_p": 0.9}  # as generation_config.json would say
    try:
        assert llm.default_params(top_p=None, seed=3) == SamplingParams(
            max_tokens=16, temperature=0.6, top_p=0.9, seed=3
        )
    finally:
        llm.suggestions = {}


def test_a_second_turn_finds_the_first_in_the_cache(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0)
    opening = [
        {"role": "user", "content": "Name the four seasons, and say which of them you like best, and why."}
    ]
    answer = llm.chat(opening, params, session_id="talk")
    again = [
        *opening,
        {"role": "assistant", "content": answer.text},
        {"role": "user", "content": "And in French?"},
    ]
    assert llm.chat(again, params, session_id="talk").cached_token_count >= 32


def test_a_shorter_context_is_one_that_requests_are_held_to() -> None:
    with LLM(max_context=64, num_blocks=64, max_running=2) as short:
        assert short.memory.max_context == 64
        result = short.generate(CAPITAL, short.default_params(chat=True, temperature=0.0, ignore_eos=True))[0]
        assert result.prompt_token_count + len(result.tokens) == 64
        with pytest.raises(InvalidRequestError, match="allowed: at most 63"):
            short.generate("word " * 100, GREEDY)


def test_memory_of_the_cache_follows_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request at a time never takes more than twice what one needs, however many different ones there were."""
    monkeypatch.setattr("weft.backends.cpu.runner._EAGER_CACHE_BYTES", 0)
    with LLM(max_context=256, max_running=4) as small:
        pool = small.engine.scheduler.kv_cache.pool
        for number in range(12):
            small.generate(f"{number} times the same words, " + "word " * 40, SamplingParams(max_tokens=2))
        assert pool.num_blocks > 1000 and pool.first_untouched <= 2 * 4


@pytest.mark.parametrize("wanted", [1, 0, -5, 8193, "64", 64.0, True])
def test_a_context_that_the_model_cannot_have_is_refused(wanted: Any) -> None:
    with pytest.raises(InvalidRequestError, match="allowed: a whole number from 2 to 8192, the model's own"):
        LLM(max_context=wanted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3,), "prompts is int; allowed: text, token ids"),
        (("x", {"max_tokens": 3}), "params is dict; allowed: SamplingParams"),
        (([None],), "either a prompt or messages"),
    ],
)
def test_a_call_that_makes_no_sense_is_told_so(llm: LLM, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(*arguments)


def test_arrays_and_iterators_of_prompts_are_fine(llm: LLM) -> None:
    ids = llm.tokenizer.encode(CAPITAL)
    expected = llm.generate(CAPITAL, GREEDY)[0].tokens
    assert llm.generate(np.array(ids), GREEDY)[0].tokens == expected
    assert [r.tokens for r in llm.generate(iter([CAPITAL, ids]), GREEDY)] == [expected] * 2


MEASURE = """
import sys
from pathlib import Path
from typing import Any
from weft.backends import registry
from weft.config import KvCachePoolConfig
from weft.loading.checkpoint import open_checkpoint

backend = registry.build("cpu", checkpoint=open_checkpoint(sys.argv[1]))
info = backend.allocate(KvCachePoolConfig(), 256)
status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
print(info.weight_bytes, *(int(status[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS")))
"""


def test_loading_never_takes_much_more_memory_than_it_ends_with(default_model_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(default_model_path)], capture_output=True, text=True, check=True
    )
    weights, peak, final = map(int, run.stdout.split())
    assert weights > 80 << 20
    assert final < weights + (150 << 20), "weights are held once, and a cache nobody uses takes nothing"
    assert peak <= 1.3 * final
