"""LLM with the default model: text in, text out."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from weft.cli.main import main
from weft.errors import InvalidRequestError, ModelFileError, WeftError
from weft.llm import LLM
from weft.request import FinishReason, GenerationResult, RequestState, SamplingParams

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
CAPITAL = "The capital of France is"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_blocks=128, max_running=4) as opened:
        yield opened


def test_results_come_in_the_order_of_the_prompts_with_their_text(llm: LLM) -> None:
    results = llm.generate([CAPITAL, "1, 2, 3, 4,"], GREEDY)
    assert [result.prompt_token_count for result in results] == [5, 11]
    assert results[0].text.startswith(" Paris")
    assert results[1].text.startswith(" 5, 6")
    assert results[0].text == llm.tokenizer.decode(results[0].tokens)
    assert llm.generate(CAPITAL, GREEDY)[0].tokens == results[0].tokens


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    short = SamplingParams(max_tokens=2, temperature=0.0)
    results = llm.generate([CAPITAL, CAPITAL], [short, GREEDY])
    assert [len(result.tokens) for result in results] == [2, 6]
    with pytest.raises(InvalidRequestError, match="1 entries for 2 prompts"):
        llm.generate([CAPITAL, CAPITAL], [short])


def test_tools_are_added_to_the_prompt_of_a_model_whose_template_has_none(llm: LLM) -> None:
    talk = [{"role": "user", "content": "hi"}]
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    without, with_tools = llm.chat(talk, GREEDY), llm.chat(talk, GREEDY, tools=[tool])
    assert with_tools.text and with_tools.prompt_token_count > without.prompt_token_count + 50


def test_a_stop_string_that_spans_tokens_is_cut_from_the_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.0, stop=("5, 6", "never"))
    result = llm.generate("1, 2, 3, 4,", params)[0]
    assert result.text == " "
    assert (result.finish_reason, result.state) == (FinishReason.STOP, RequestState.COMPLETED)
    assert llm.tokenizer.decode(result.tokens) == " 5, 6"
    assert "".join(llm.stream("1, 2, 3, 4,", params)) == " "


def test_a_request_ended_by_a_stop_string_counts_as_completed_in_the_engine(llm: LLM) -> None:
    before = llm.engine.metrics()
    params = SamplingParams(max_tokens=30, temperature=0.0, stop=("5, 6",), logprobs=0)
    result = llm.generate("1, 2, 3, 4,", params)[0]
    after = llm.engine.metrics()
    assert after.requests_completed == before.requests_completed + 1
    assert after.requests_cancelled == before.requests_cancelled
    kept = llm.engine.get_result(result.request_id)
    assert kept is not None
    assert (kept.tokens, kept.finish_reason, kept.error) == (result.tokens, FinishReason.STOP, None)
    assert result.logprobs is not None and len(result.logprobs) == len(result.tokens)


def test_a_stop_string_completed_by_the_last_token_gives_the_finish_reason_stop(llm: LLM) -> None:
    free = llm.generate("1, 2, 3, 4,", SamplingParams(max_tokens=5, temperature=0.0))[0]
    assert free.text.endswith("5, 6") and free.finish_reason is FinishReason.LENGTH
    cut = llm.generate("1, 2, 3, 4,", SamplingParams(max_tokens=5, temperature=0.0, stop=("5, 6",)))[0]
    assert (cut.text, cut.finish_reason) == (" ", FinishReason.STOP)


def test_stop_strings_are_ignored_before_min_tokens(llm: LLM) -> None:
    options = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    free = llm.generate("1, 2, 3, 4,", SamplingParams(**options))[0]  # type: ignore[arg-type]
    result = llm.generate("1, 2, 3, 4,", SamplingParams(**options, stop=(",",), min_tokens=8))[0]  # type: ignore[arg-type]
    assert llm.tokenizer.decode(free.tokens[:8]).count(",") >= 2
    assert len(result.tokens) >= 8
    assert result.tokens == free.tokens[: len(result.tokens)]
    assert result.finish_reason is FinishReason.STOP
    assert result.text + "," == llm.tokenizer.decode(result.tokens)


def test_an_incomplete_stream_raises() -> None:
    with LLM(num_blocks=128, max_running=4, request_timeout=0.2) as hurried:
        results: list[GenerationResult] = []
        params = SamplingParams(max_tokens=2000, temperature=0.0, ignore_eos=True)
        with pytest.raises(WeftError, match=r"not complete: deadline of 0\.2 s passed"):
            for _ in hurried.stream(CAPITAL, params, on_result=results.append):
                pass
        assert results[0].state is not RequestState.COMPLETED
    stopped = LLM(num_blocks=128, max_running=4)
    stream = stopped.stream(CAPITAL, params)
    next(stream)
    stopped.close()
    with pytest.raises(WeftError, match="not complete: the engine was stopped"):
        list(stream)


def test_a_stream_passes_its_result_to_on_result(llm: LLM) -> None:
    results: list[GenerationResult] = []
    text = "".join(llm.stream(CAPITAL, GREEDY, on_result=results.append))
    assert [(result.text, result.finish_reason) for result in results] == [(text, FinishReason.LENGTH)]


def test_the_pieces_of_a_stream_make_the_text_of_the_result(llm: LLM) -> None:
    assert "".join(llm.stream(CAPITAL, GREEDY)) == llm.generate(CAPITAL, GREEDY)[0].text


def test_leaving_a_stream_cancels_the_request(llm: LLM) -> None:
    stream = llm.stream(CAPITAL, SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True))
    next(stream)
    stream.close()
    llm.generate(CAPITAL, SamplingParams(max_tokens=1))
    assert llm.engine.metrics().requests_running == 0


def test_chat_uses_the_chat_template_of_the_model(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Name the capital of France."}]
    result = llm.chat(messages, SamplingParams(max_tokens=40, temperature=0.0))
    assert "Paris" in result.text
    assert result.finish_reason is FinishReason.END_OF_SEQUENCE
    assert "<|im_end|>" not in result.text


def test_a_prompt_that_cannot_run_is_refused_with_both_numbers(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"prompt has \d+ tokens; allowed: at most 2047"):
        llm.generate([CAPITAL, "word " * 3000], GREEDY)
    assert llm.generate(CAPITAL, GREEDY)[0].state is RequestState.COMPLETED


def test_unknown_options_are_refused_with_their_name() -> None:
    with pytest.raises(InvalidRequestError, match=r"no option 'blocks'; allowed: .*num_blocks"):
        LLM(blocks=3)


def test_a_file_that_is_not_a_model_is_refused(tmp_path: object) -> None:
    with pytest.raises(ModelFileError, match="magic"):
        LLM(__file__)


def test_an_invalid_model_file_gives_exit_code_2_and_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["weft", "generate", "x", "--model", __file__])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert capsys.readouterr().err.strip().count("\n") == 0
