"""Validation of requests: each error names the field, the value and the allowed range; valid values are accepted."""

from __future__ import annotations

import math
from typing import Any

import pytest

from weft.config import KvCachePoolConfig, PriorityPolicy, SchedulerConfig, ServingEngineConfig
from weft.errors import InvalidRequestError
from weft.request import (
    PARAMETERS,
    GenerationResult,
    InferenceRequest,
    Priority,
    RequestId,
    RequestState,
    SamplingParams,
    numbered_ids,
)
from weft.sampling.words import flags_of, sampler_flags, sampler_words

HUGE = 10**400
LONGER_THAN_PYTHON_PRINTS = 10**5000

REFUSED = [
    ("max_tokens", [0, -1, 2**31, 1.0, "5", True, HUGE, LONGER_THAN_PYTHON_PRINTS]),
    ("min_tokens", [-1, 17, 0.5, True, HUGE]),
    ("temperature", [-0.1, 100.1, math.nan, math.inf, -math.inf, "1", None, True, HUGE]),
    ("top_p", [0.0, -1.0, 1.01, math.nan, math.inf, True, HUGE]),
    ("top_k", [-2, 2**31, 1.5, True, HUGE]),
    ("min_p", [-0.01, 1.01, math.nan, True, HUGE]),
    ("typical_p", [0.0, 1.01, math.nan, True, HUGE]),
    ("xtc_probability", [-0.01, 1.01, math.nan, True, HUGE]),
    ("xtc_threshold", [0.0, 1.01, math.nan, True, HUGE]),
    ("repetition_penalty", [0.0, -1.0, 100.1, math.inf, math.nan, True, HUGE]),
    ("frequency_penalty", [-2.01, 2.01, math.nan, True, HUGE]),
    ("presence_penalty", [-2.01, 2.01, math.nan, True, HUGE]),
    ("seed", [2**63, -(2**63) - 1, 1.0, "7", True, HUGE]),
    ("n", [0, 129, 1.0, True, HUGE]),
    ("logprobs", [-1, 21, 1.0, True, HUGE]),
    ("prompt_logprobs", [-1, 21, True]),
    ("stop", [[""], ["x" * 1025], ["a"] * 17, [1], 5]),
    ("stop_token_ids", [[-1], [2**31], [1.0], [True], ["1"], 3, [HUGE]]),
    ("logit_bias", [{-1: 0.0}, {2**31: 0.0}, {True: 0.0}, {"1": 0.0}, [1], dict.fromkeys(range(1025), 0.0)]),
    ("ignore_eos", ["no", 1, None]),
]


def shown(value: object) -> str:
    return "huge" if isinstance(value, int) and value.bit_length() > 64 else str(value)[:20]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in REFUSED for value in values], ids=shown
)
def test_a_parameter_out_of_range_is_refused_with_its_name_its_value_and_the_range(
    name: str, value: Any
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.field.startswith(name)
    message = str(caught.value)
    assert message.startswith(name) and " is " in message and "allowed: " in message
    assert len(message) < 250, "a huge value makes the message too long"


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("max_tokens", 0, ["max_tokens", "0", "from 1 to 2147483647"]),
        ("temperature", 200.0, ["temperature", "200.0", "from 0, up to 100"]),
        ("top_p", 0.0, ["top_p", "0.0", "above 0, up to 1"]),
        ("min_tokens", 99, ["min_tokens", "99", "from 0 to 16"]),
        ("logit_bias", {3: 101.0}, ["logit_bias[3]", "101.0", "from -100, up to 100"]),
    ],
)
def test_the_message_has_the_value_and_both_bounds(name: str, value: Any, parts: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("bias", [math.nan, math.inf, -100.5, HUGE, True, "1"], ids=shown)
def test_a_bias_out_of_range_is_refused_with_its_token(bias: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"logit_bias\[5\]"):
        SamplingParams(logit_bias={5: bias})


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_tokens": 1},
        {"max_tokens": None},
        {"max_tokens": None, "min_tokens": 100_000},
        {"max_tokens": 2**31 - 1},
        {"max_tokens": 5, "min_tokens": 5},
        {"temperature": 0},
        {"temperature": 0.0},
        {"temperature": 100},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"top_k": 0},
        {"top_k": -1},
        {"min_p": 0},
        {"min_p": 1},
        {"seed": 0},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"frequency_penalty": -2},
        {"repetition_penalty": 0.5},
        {"logprobs": 0},
        {"logprobs": 20},
        {"n": 128},
        {"stop": ["x" * 1024] * 16},
        {"stop_token_ids": [0, 2**31 - 1]},
        {"logit_bias": {0: -100, 1: 100.0}},
    ],
    ids=str,
)
def test_values_at_the_bounds_are_accepted(arguments: dict[str, Any]) -> None:
    params = SamplingParams(**arguments)
    for name, value in arguments.items():
        assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value)


def test_a_single_stop_string_needs_no_list() -> None:
    assert SamplingParams(stop="end").stop == ("end",)


@pytest.mark.parametrize(
    "prompt", [[], (), "text", [1.5], ["1"], None, 5, [None], [[1]], [True, False]], ids=repr
)
def test_a_prompt_that_is_not_a_list_of_token_ids_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        InferenceRequest(prompt)
    assert caught.value.field == "prompt" and "allowed: " in str(caught.value)


def test_a_prompt_may_be_any_iterable_of_token_ids_and_becomes_a_tuple() -> None:
    assert InferenceRequest([1, 2]).prompt == InferenceRequest(iter([1, 2])).prompt == (1, 2)  # type: ignore[arg-type]
    assert InferenceRequest(range(2)).prompt == (0, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", 4),
        ("priority", -1),
        ("priority", "urgent"),
        ("priority", None),
        ("priority", True),
        ("priority", 1.0),
        ("deadline", -1.0),
        ("deadline", math.nan),
        ("deadline", math.inf),
        ("deadline", True),
        ("deadline", HUGE),
        ("ttft_target", -0.001),
        ("ttft_target", math.nan),
        ("max_sequence_length", 1),
        ("max_sequence_length", 2.0),
        ("max_sequence_length", True),
        ("max_sequence_length", 2**31),
        ("cache_salt", 5),
        ("cache_salt", "\ud800"),
        ("adapter_id", 5),
        ("adapter_id", "an-adapter"),
        ("metadata", 5),
    ],
    ids=ascii,
)
def test_a_field_of_a_request_out_of_range_is_refused_with_its_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        InferenceRequest((1,), **{name: value})
    assert caught.value.field == name and str(caught.value).startswith(name)


def test_valid_fields_of_a_request_are_accepted() -> None:
    request = InferenceRequest(
        (1,),
        priority=2,
        deadline=0,
        ttft_target=0.0,
        max_sequence_length=2,
        cache_salt="é",
        metadata={"a": object()},  # type: ignore[arg-type]
    )
    assert request.priority is Priority.HIGH and request.deadline == 0


def test_priorities_are_ordered_and_normal_is_the_default() -> None:
    assert Priority.LOW < Priority.NORMAL < Priority.HIGH < Priority.CRITICAL
    assert InferenceRequest((1,)).priority is Priority.NORMAL


def test_only_completed_failed_and_cancelled_requests_have_ended() -> None:
    ended = {state for state in RequestState if state.is_over}
    assert ended == {RequestState.COMPLETED, RequestState.FAILED, RequestState.CANCELLED}


def test_decode_speed_counts_decode_steps_over_decode_time_only() -> None:
    def result(**changes: Any) -> GenerationResult:
        values: dict[str, Any] = dict.fromkeys(GenerationResult.__dataclass_fields__, 0)
        return GenerationResult(**{**values, "tokens": (1, 2, 3), "num_tokens": None, **changes})

    timed = result(waiting_time=5.0, prefill_time=3.0, decode_time=0.5, decode_steps=2)
    assert (
        timed.decode_tokens_per_second == 4.0
        and timed.total_time == 8.5
        and timed.completion_token_count == 3
    )
    assert result(tokens=(), num_tokens=7).completion_token_count == 7, (
        "num_tokens counts if tokens are left out"
    )
    assert result(decode_time=0.0, decode_steps=2).decode_tokens_per_second is None
    assert result(decode_time=1.0, decode_steps=0).decode_tokens_per_second is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_running", 0),
        ("max_running", True),
        ("max_running", 2.5),
        ("max_running", math.inf),
        ("max_running", "8"),
        ("max_sequences_per_step", 257),
        ("max_sequences_per_step", 0),
        ("max_tokens_per_step", 255),
        ("max_tokens_per_step", math.inf),
        ("max_prefill_tokens", 2049),
        ("max_prefill_tokens", 0),
        ("max_chunk_tokens", 0),
        ("ageing_rate", -0.1),
        ("ageing_rate", math.nan),
        ("ageing_rate", math.inf),
        ("target_inter_token_latency", 0.0),
        ("target_inter_token_latency", math.nan),
        ("max_waiting_requests", 0),
        ("max_waiting_tokens", 0),
        ("policy", "no such policy"),
        ("preemption", "no such mode"),
    ],
    ids=str,
)
def test_an_option_of_the_scheduler_out_of_range_is_refused_with_its_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SchedulerConfig(**{name: value})
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (KvCachePoolConfig, "block_size", 0),
        (KvCachePoolConfig, "block_size", 1.5),
        (KvCachePoolConfig, "num_blocks", 0),
        (KvCachePoolConfig, "swap_blocks", -1),
        (ServingEngineConfig, "stream_buffer", 0),
        (ServingEngineConfig, "max_kept_results", 0),
        (ServingEngineConfig, "request_timeout", -1.0),
        (ServingEngineConfig, "request_timeout", math.nan),
        (ServingEngineConfig, "request_timeout", math.inf),
    ],
    ids=str,
)
def test_an_option_of_cache_or_engine_out_of_range_is_refused_with_its_name(
    kind: type, name: str, value: Any
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        kind(**{name: value})
    assert name in str(caught.value)


def test_without_chunked_prefill_a_step_must_have_tokens_left_beside_the_decodes() -> None:
    with pytest.raises(InvalidRequestError, match="chunked_prefill is off"):
        SchedulerConfig(max_running=8, max_tokens_per_step=8, max_prefill_tokens=8, chunked_prefill=False)
    config = SchedulerConfig(
        max_running=8, max_tokens_per_step=20, max_prefill_tokens=16, chunked_prefill=False
    )
    assert config.longest_whole_prompt == 12
    assert SchedulerConfig(policy=PriorityPolicy.ADAPTIVE).sequences_per_step == 256


@pytest.mark.parametrize("request_id", ["a", "6f1c-0.b:c/d+e=f@g", "x" * 128])
def test_a_request_may_have_an_id_of_its_own(request_id: str) -> None:
    assert InferenceRequest((1,), request_id=RequestId(request_id)).request_id == request_id


@pytest.mark.parametrize("request_id", ["a b", "é", "x\n", "\x00", "x" * 129, 7, None, b"a", ("a",)])
def test_an_id_with_other_characters_or_of_another_type_is_refused(request_id: object) -> None:
    with pytest.raises(InvalidRequestError, match="allowed: 1 to 128 of letters") as refused:
        InferenceRequest((1,), request_id=request_id)  # type: ignore[arg-type]
    assert refused.value.field == "request_id"


def test_the_ids_of_answers_are_the_id_and_their_index_and_have_the_same_limit() -> None:
    one, several = (InferenceRequest((1,), SamplingParams(n=n), request_id=RequestId("a")) for n in (1, 12))
    assert [child.request_id for child in one.children(0)] == ["a"]
    assert [child.request_id for child in several.children(0)] == [f"a-{index}" for index in range(12)]
    assert [child.request_id for child in several.children(0, range(3, 5))] == ["a-3", "a-4"]
    InferenceRequest((1,), SamplingParams(n=10), request_id=RequestId("x" * 126))
    with pytest.raises(InvalidRequestError, match="with the index of each answer"):
        InferenceRequest((1,), SamplingParams(n=11), request_id=RequestId("x" * 126))


def test_numbered_ids_are_the_same_in_every_run() -> None:
    first, second = numbered_ids(), numbered_ids()
    assert [first() for _ in range(3)] == [second() for _ in range(3)] == ["0", "1", "2"]


# --- the table of sampling parameters -----------------------------------------------------------------------------


def test_the_table_has_every_sampling_parameter_with_a_range_and_a_description() -> None:
    assert list(PARAMETERS)[:2] == ["temperature", "top_p"]
    assert {name for name, values in REFUSED if math.nan in values} <= set(PARAMETERS), (
        "a number without a range"
    )
    for name, parameter in PARAMETERS.items():
        assert parameter.words.endswith("."), name
        assert parameter.low <= parameter.default <= parameter.high, name
        assert any(name == refused for refused, _ in REFUSED), f"{name} has no test of its range"


@pytest.mark.parametrize("name", [name for name in PARAMETERS if name != "temperature"])
def test_a_parameter_has_a_flag_only_where_it_has_an_effect(name: str) -> None:
    parameter = PARAMETERS[name]
    used = SamplingParams(temperature=0.0, **{name: 3 if parameter.kind is int else 0.25})
    assert sampler_flags(used) == flags_of(name)
    for value in parameter.off or (parameter.default,):
        assert sampler_flags(SamplingParams(temperature=0.0, **{name: value})) == 0


def test_samplers_get_the_numbers_in_the_order_of_the_table() -> None:
    words = sampler_words(SamplingParams(temperature=0.5, top_k=7, min_p=0.25))
    found = dict(zip(PARAMETERS, words, strict=True))
    assert (found["temperature"], found["top_p"], found["top_k"]) == (0.5, 1.0, 7)
    assert found["min_p"] == math.log(0.25)
    assert sampler_words(SamplingParams())[list(PARAMETERS).index("min_p")] == -math.inf
