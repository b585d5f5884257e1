"""More of LLM: several answers, logprobs, jobs with back-pressure, defaults, sessions, memory."""

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


def test_top_logprobs_are_sorted_and_begin_with_the_greedy_token(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=5, prompt_logprobs=2)
    result = llm.generate(CAPITAL, params)[0]
    assert result.logprobs is not None and len(result.logprobs) == 3
    for token, logprobs in zip(result.tokens, result.logprobs, strict=True):
        assert logprobs.top[0] == (token, logprobs.logprob), "a greedy token has the highest logprob"
        assert [value for _, value in logprobs.top] == sorted(
            (value for _, value in logprobs.top), reverse=True
        )
        assert sum(np.exp(value) for _, value in logprobs.top) <= 1.0
    assert result.prompt_logprobs is not None and len(result.prompt_logprobs) == result.prompt_token_count
    assert result.prompt_logprobs[0] is None
    assert all(one is not None and len(one.top) == 2 for one in result.prompt_logprobs[1:])


def test_a_prompt_may_be_token_ids(llm: LLM) -> None:
    ids = llm.tokenizer.encode(CAPITAL)
    results = [llm.generate(ids, GREEDY), llm.generate([ids], GREEDY), llm.generate(CAPITAL, GREEDY)]
    assert len({result[0].tokens for result in results}) == 1 and all(len(r) == 1 for r in results)


def test_several_conversations_are_answered_as_one_batch(llm: LLM) -> None:
    other = [{"role": "user", "content": "Say hello."}]
    together = llm.chat_all([QUESTION, other], GREEDY)
    assert [r.tokens for r in together] == [llm.chat(QUESTION, GREEDY).tokens, llm.chat(other, GREEDY).tokens]


# --- jobs -------------------------------------------------------------------------------------------------------


def test_an_invalid_job_gives_its_error_and_the_others_their_results(llm: LLM) -> None:
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


def test_a_value_that_is_not_a_job_gives_an_error(llm: LLM) -> None:
    outcomes = [result for _, result in llm.run([None, PromptJob(CAPITAL, params=GREEDY)])]  # type: ignore[list-item]
    assert sorted(type(outcome).__name__ for outcome in outcomes) == [
        "GenerationResult",
        "InvalidRequestError",
    ]


def test_the_end_of_sequence_token_is_not_part_of_the_text(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the vocabulary marks it as normal text, as some files do."""
    monkeypatch.setattr(llm.tokenizer, "control_ids", frozenset())
    end = min(llm.engine.scheduler.info.eos_token_ids)
    result = llm.generate(CAPITAL, SamplingParams(max_tokens=5, temperature=0.0, logit_bias={end: 100.0}))[0]
    assert (result.tokens, result.text) == ((end,), "")


def test_an_llm_without_references_is_stopped() -> None:
    forgotten = LLM(num_blocks=64, max_running=2)
    forgotten.generate(CAPITAL, GREEDY)
    engine, name = forgotten.engine, "weft-engine"
    running = [thread for thread in threading.enumerate() if thread.name == name]
    del forgotten
    gc.collect()
    with pytest.raises(EngineStoppedError):
        engine.submit(InferenceRequest((1,)))
    assert len([thread for thread in threading.enumerate() if thread.name == name]) < len(running)


def test_jobs_are_read_only_as_fast_as_they_end(llm: LLM) -> None:
    taken = []

    def endless() -> Iterator[PromptJob]:
        for number in itertools.count():
            taken.append(number)
            yield PromptJob(f"Number {number} is", params=SamplingParams(max_tokens=1), key=number)

    outcomes = llm.run(endless())
    done = [next(outcomes)[0].key for _ in range(20)]
    outcomes.close()  # type: ignore[attr-defined]
    assert len(set(done)) == 20
    assert len(taken) <= 20 + 4 * 4 + 1, "too many jobs were read ahead"
    llm.generate(CAPITAL, GREEDY)
    assert llm.engine.metrics().requests_running == 0, "leaving the loop did not cancel the rest"


def test_results_are_yielded_while_the_source_makes_the_next_job(llm: LLM) -> None:
    answered = threading.Event()

    def slowly() -> Iterator[PromptJob]:
        yield PromptJob(CAPITAL, params=GREEDY, key=0)
        assert answered.wait(60), "the first result waited for the second job"
        yield PromptJob(CAPITAL, params=GREEDY, key=1)

    keys = []
    for job, _ in llm.run(slowly()):
        keys.append(job.key)
        answered.set()
    assert keys == [0, 1]


def test_an_error_of_the_job_source_is_raised_and_cancels_the_rest(llm: LLM) -> None:
    def broken() -> Iterator[PromptJob]:
        yield PromptJob(CAPITAL, params=SamplingParams(max_tokens=200, ignore_eos=True))
        raise ZeroDivisionError("planted")

    with pytest.raises(ZeroDivisionError):
        list(llm.run(broken()))
    llm.generate(CAPITAL, GREEDY)
    assert llm.engine.metrics().requests_running == 0


def test_leaving_a_stream_early_passes_the_partial_result_to_on_result(llm: LLM) -> None:
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


def test_defaults_come_from_the_model_and_a_chat_may_fill_the_context(llm: LLM) -> None:
    assert llm.default_params() == SamplingParams(max_tokens=16)
    assert llm.default_params(chat=True).max_tokens is None
    llm.suggestions = {"temperature": 0.6, "top_p": 0.9}  # as from a generation_config.json
    try:
        assert llm.default_params(top_p=None, seed=3) == SamplingParams(
            max_tokens=16, temperature=0.6, top_p=0.9, seed=3
        )
    finally:
        llm.suggestions = {}


def test_the_second_message_of_a_conversation_has_a_prefix_hit(llm: LLM) -> None:
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


def test_max_context_limits_requests() -> None:
    with LLM(max_context=64, num_blocks=64, max_running=2) as short:
        assert short.memory.max_context == 64
        result = short.generate(CAPITAL, short.default_params(chat=True, temperature=0.0, ignore_eos=True))[0]
        assert result.prompt_token_count + len(result.tokens) == 64
        with pytest.raises(InvalidRequestError, match="allowed: at most 63"):
            short.generate("word " * 100, GREEDY)


def test_memory_of_the_cache_follows_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that run one after the other never need more than twice the memory of one."""
    monkeypatch.setattr("weft.backends.cpu.runner._EAGER_CACHE_BYTES", 0)
    with LLM(max_context=256, max_running=4) as small:
        pool = small.engine.scheduler.kv_cache.pool
        for number in range(12):
            small.generate(f"{number} times the same words, " + "word " * 40, SamplingParams(max_tokens=2))
        assert pool.num_blocks > 1000 and pool.first_untouched <= 2 * 4


@pytest.mark.parametrize("context", [1, 0, -5, 8193, "64", 64.0, True])
def test_an_invalid_max_context_is_refused(context: Any) -> None:
    with pytest.raises(InvalidRequestError, match="allowed: a whole number from 2 to 8192, the model's own"):
        LLM(max_context=context)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3,), "prompts is int; allowed: text, token ids"),
        (("x", {"max_tokens": 3}), "params is dict; allowed: SamplingParams"),
        (([None],), "either a prompt or messages"),
    ],
)
def test_an_invalid_call_raises_with_the_reason(llm: LLM, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(*arguments)


def test_prompts_may_be_arrays_and_iterators(llm: LLM) -> None:
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


def test_loading_never_needs_much_more_memory_than_the_loaded_model(default_model_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(default_model_path)], capture_output=True, text=True, check=True
    )
    weights, peak, final = map(int, run.stdout.split())
    assert weights > 80 << 20
    assert final < weights + (150 << 20), "weights are in memory once, and an unused cache takes none"
    assert peak <= 1.3 * final
