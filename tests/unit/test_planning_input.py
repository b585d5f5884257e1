"""What `weft plan` reads: traces, descriptions and profiles. Each mistake is one line that says what to do."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from weft.engine.replay import LOG_VERSION
from weft.errors import InvalidRequestError
from weft.planning.costs import MeasuredCosts, StepShape
from weft.planning.description import Description, LengthRange, described, parse_lengths
from weft.planning.load import Load, read_description, summarise_load
from weft.planning.profile import parse_profile, read_profile, shipped_profiles, write_profile
from weft.planning.replica import PlannedRequest, answer_segment
from weft.planning.search import parse_sweep
from weft.planning.traces import read_trace

CONTEXT = 8192
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:51.2224670,879,55
"""
MOONCAKE = [
    {"timestamp": 1000, "input_length": 1100, "output_length": 52, "hash_ids": [1, 2, 3]},
    {"timestamp": 1500, "input_length": 1030, "output_length": 10, "hash_ids": [1, 2, 9]},
]
OPENAI = [
    {"timestamp": 5, "usage": {"prompt_tokens": 10, "completion_tokens": 3}, "session_id": "a", "model": "m"},
    {"timestamp": "1970-01-01T00:00:07.500+00:00", "usage": {"prompt_tokens": 20, "completion_tokens": 4}},
]


START = {"event": "start", "version": LOG_VERSION}


def written(path: Path, content: str | bytes | list[Any]) -> Path:
    if isinstance(content, bytes):
        path.write_bytes(content)
        return path
    text = content if isinstance(content, str) else "".join(json.dumps(one) + "\n" for one in content)
    path.write_text(text, "utf-8")
    return path


def read(path: Path, **options: Any) -> list[PlannedRequest]:
    return list(read_trace(path, context=options.pop("context", CONTEXT), **options))


def test_an_azure_trace_is_read_with_its_times_and_lengths(tmp_path: Path) -> None:
    found = read(written(tmp_path / "a.csv", AZURE))
    assert [(one.prompt_tokens, one.answer_tokens) for one in found] == [(374, 44), (396, 109), (879, 55)]
    assert [round(one.at, 4) for one in found] == [0.0, 4.3146, 64.5419]
    assert not set(found[0].prompt()) & set(found[1].prompt()), "requests without known prefixes share text"


def test_a_mooncake_trace_shares_the_blocks_with_equal_ids(tmp_path: Path) -> None:
    first, second = read(written(tmp_path / "m.jsonl", MOONCAKE))
    assert (len(first.prompt()), len(second.prompt())) == (1100, 1030)
    assert second.at == 0.5
    assert first.prompt()[:1024] == second.prompt()[:1024]
    assert first.prompt()[1024] != second.prompt()[1024]


def test_an_openai_style_log_is_read_with_sessions_and_both_forms_of_time(tmp_path: Path) -> None:
    first, second = read(written(tmp_path / "o.jsonl", OPENAI))
    assert (first.prompt_tokens, first.answer_tokens, first.session) == (10, 3, "a")
    assert (second.prompt_tokens, second.at, second.session) == (20, 2.5, None)


def test_speed_and_limit_change_the_times_and_the_number(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", AZURE)
    fast = read(path, speed=2.0, limit=2)
    assert [round(one.at, 4) for one in fast] == [0.0, 2.1573]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        ("a,b,c\n1,2,3\n", "TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("TIMESTAMP,Context,Generated\n1,2,3\n", "line 1: the columns are"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2\n", "line 2: 2 columns"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,-2,3\n", "line 2: '-2' is no number of tokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,2,3\n", "line 2: 'soon' is no time"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n-1,2,3\n", "line 2: the time is -1.0"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n5,2,3\n4,2,3\n", "line 3: the time is 1.000 s before"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,0,3\n", "both must have at least 1"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n1,8000,300\n",
            "together 8300; the context of the profile is 8192",
        ),
        ([{"timestamp": -5, "input_length": 5, "output_length": 5, "hash_ids": [1]}], "timestamp is -5"),
        ([{"timestamp": 5, "input_length": 5, "hash_ids": [1]}], "None is no number of tokens"),
        ([{"timestamp": 5, "input_length": 5, "output_length": 5, "hash_ids": "x"}], "hash_ids is 'x'"),
        (
            [{"timestamp": 5, "input_length": 2000, "output_length": 5, "hash_ids": [1]}],
            "1 hash_ids for 2000 tokens",
        ),
        ([{"usage": {"prompt_tokens": 3, "completion_tokens": 1}}], "there is no time"),
        ([{"timestamp": 5, "prompt_tokens": 3}], "usage is None"),
        ([{"timestamp": "x", "usage": {"prompt_tokens": 3, "completion_tokens": 1}}], "'x' is no time"),
        ([[1, 2]], "the columns are '[1, 2]'"),
        (f"TIMESTAMP,ContextTokens,GeneratedTokens\n1,{'9' * 5000},3\n", "line 2: '999"),
        (f"TIMESTAMP,ContextTokens,GeneratedTokens\n1,{'9' * 200_000},3\n", "field larger than field limit"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1e400,5,3\n", "it must be a number from 0 to 1e+15"),
        (
            [{"timestamp": 10**400, "usage": {"prompt_tokens": 3, "completion_tokens": 1}}],
            "timestamp is 1000",
        ),
        (
            [{"timestamp": 5, "usage": {"prompt_tokens": 10**400, "completion_tokens": 1}}],
            "is no number of tokens",
        ),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n1,5,3\n\xff,5,3\n", "can't decode byte 0xff"),
        (b"\xff\xfe", "can't decode byte 0xff"),
        ([START, [1]], "line 2: not a JSON object"),
        ([START, {"event": "add"}], "line 2: not of this form (KeyError: 'requests')"),
        ([START, {"event": "apply", "result": {"tokens": [1]}}], "line 2: not of this form (IndexError"),
        ([START, {"event": "finish", "id": "a", "num_tokens": "x"}], "'x' is no number of tokens"),
        ('{"timestamp": 5, "usage": {', "line 1: not JSON"),
        ([{"event": "start", "version": 1}], "the log has version 1"),
    ],
)
def test_a_trace_with_a_mistake_is_refused_with_one_line(tmp_path: Path, content: Any, words: str) -> None:
    path = written(tmp_path / "trace", content)
    with pytest.raises(InvalidRequestError) as caught:
        read(path)
    message = str(caught.value)
    assert words in message
    assert str(path) in message and "\n" not in message
    assert caught.value.exit_code == 2


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    for content in (AZURE, "".join(json.dumps(one) + "\n" for one in OPENAI)):
        assert read(written(tmp_path / "a", "\ufeff" + content)) == read(written(tmp_path / "b", content))


def test_times_without_a_zone_are_utc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Berlin has no 02:30 on this day: with its clock the two requests are 0 s apart.
    lines = "2024-03-31 01:59:00,5,5\n2024-03-31 03:01:00,5,5\n2024-03-31 03:02:00+00:00,5,5\n"
    path = written(tmp_path / "a.csv", f"TIMESTAMP,ContextTokens,GeneratedTokens\n{lines}")
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        assert [one.at for one in read(path)] == [0.0, 3720.0, 3780.0]
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be read: No such file"):
        read(tmp_path / "none.csv")


# ---------------------------------------------------------------------- descriptions


def test_a_description_gives_the_same_requests_for_the_same_seed() -> None:
    load = Description(5.0, 200, LengthRange(400, 4000, True), LengthRange(16, 256), seed=3)
    first, second = list(described(load, context=CONTEXT)), list(described(load, context=CONTEXT))
    assert first == second
    assert first != list(described(dataclasses.replace(load, seed=4), context=CONTEXT))
    assert all(before.at <= after.at for before, after in pairwise(first))
    assert all(one.prompt_tokens + one.answer_tokens <= CONTEXT for one in first)
    assert first[-1].at == pytest.approx(40, rel=0.3)


def test_log_normal_lengths_have_the_given_median_and_99th_percentile() -> None:
    load = Description(1.0, 4000, parse_lengths("400~4000", "prompt_tokens"))
    lengths = sorted(one.prompt_tokens for one in described(load, context=1 << 20))
    assert lengths[2000] == pytest.approx(400, rel=0.1)
    assert lengths[3960] == pytest.approx(4000, rel=0.25)


def test_bursts_arrive_at_once_and_keep_the_rate() -> None:
    found = list(described(Description(4.0, 16, burst=8), context=CONTEXT))
    assert [one.at for one in found] == [0.0] * 8 + [2.0] * 8


def test_requests_with_a_shared_prefix_begin_with_the_same_tokens() -> None:
    found = list(described(Description(4.0, 50, prefix=64, prefixes=2), context=CONTEXT))
    beginnings = {one.prompt()[:64] for one in found}
    assert len(beginnings) == 2
    assert len({one.prompt()[64:] for one in found}) == 50


def test_a_turn_of_a_conversation_begins_with_the_turn_before_and_its_answer() -> None:
    load = Description(2.0, 60, LengthRange(8, 32), LengthRange(8, 32), turns=LengthRange(2, 4), pause=5.0)
    by_session: dict[str | None, list[PlannedRequest]] = {}
    for one in described(load, context=CONTEXT):
        by_session.setdefault(one.session, []).append(one)
    longest = max(by_session.values(), key=len)
    assert 2 <= len(longest) <= 4
    for before, after in pairwise(longest):
        assert after.segments[: len(before.segments) + 1] == (*before.segments, answer_segment(before))


def test_conversations_end_before_they_exceed_the_context() -> None:
    load = Description(5.0, 100, LengthRange(60, 90), LengthRange(60, 90), turns=LengthRange(9, 9), pause=1.0)
    found = list(described(load, context=512))
    assert max(one.prompt_tokens + one.answer_tokens for one in found) <= 512
    assert len({one.session for one in found}) > 100 / 9


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rate = -1", "rate is -1.0; allowed: above 0"),
        ("rate = 'x'", "rate is 'x'; it must be a number"),
        ("rate = 1\nrequests = 0", "requests is 0; allowed: at least 1"),
        ("rate = 1\nrequests = 1.5", "requests is 1.5; it must be a whole number"),
        ("rate = 1\nprompt_tokens = '9-3'", "prompt_tokens is '9-3'"),
        ("rate = 1\nmax_tokens = 0", "max_tokens is 0"),
        ("rate = 1\nturns = '1~4'", "turns has a '~'"),
        ("rate = 1\nspeeed = 2", "unknown field 'speeed'; known: rate"),
        ("prompt_tokens = 5", "there is no load"),
        ("rate = = 1", "is not TOML"),
    ],
)
def test_a_description_with_a_mistake_is_refused_with_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = written(tmp_path / "load.toml", text)
    with pytest.raises(InvalidRequestError) as caught:
        read_description(path, {})
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_options_replace_the_fields_of_a_file(tmp_path: Path) -> None:
    path = written(tmp_path / "load.toml", "rate = 2\nprompt_tokens = '16-512'\nrequests = 9")
    found = read_description(path, {"rate": 3.0, "burst": None})
    assert (found.rate, found.requests, found.prompt) == (3.0, 9, LengthRange(16, 512))


def test_a_description_that_never_fits_the_context_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at least 612 tokens; the context of the profile is 512"):
        list(
            described(Description(1.0, 1, LengthRange(50, 60), LengthRange(50, 60), prefix=512), context=512)
        )


def test_the_summary_of_a_load_counts_its_requests_and_tokens(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", AZURE)
    found = summarise_load(Load(CONTEXT, trace=path))
    assert (found.name, found.requests, found.cut) == ("a.csv (azure)", 3, 0)
    assert (found.prompt_tokens, found.seconds) == (
        pytest.approx(549.67, abs=0.01),
        pytest.approx(64.54, abs=0.01),
    )


def test_the_summary_counts_conversations_whose_turns_are_mixed_with_others() -> None:
    talk = Description(20.0, 60, turns=LengthRange(3, 3), pause=5.0)
    sessions = [one.session for one in described(talk, context=CONTEXT)]
    changes = sum(one != other for one, other in pairwise(sessions))
    assert summarise_load(Load(CONTEXT, talk)).conversations == len(set(sessions)) < changes


def test_the_summary_counts_requests_that_were_cut_to_the_context() -> None:
    load = Description(1.0, 500, parse_lengths("100~1000", "prompt_tokens"), LengthRange(100, 100))
    whole = [one.prompt_tokens for one in described(load, context=1 << 20)]
    found = summarise_load(Load(600, load))
    assert found.cut == sum(count + 100 > 600 for count in whole) > 10


def test_the_seed_of_a_file_counts_where_no_option_is_given(tmp_path: Path) -> None:
    path = written(tmp_path / "load.toml", "rate = 2\nseed = 7")
    assert read_description(path, {"seed": None}).seed == 7
    assert read_description(path, {"seed": 3}).seed == 3


# ---------------------------------------------------------------------- profiles


def test_the_shipped_profiles_are_read_and_written_unchanged(tmp_path: Path) -> None:
    assert shipped_profiles() == ["h200-8b-derived", "zen4-2-cores"]
    for name in shipped_profiles():
        profile = read_profile(name)
        write_profile(profile, tmp_path / "copy.json")
        assert read_profile(str(tmp_path / "copy.json")) == profile


def changed(**fields: Any) -> str:
    path = Path(__file__).parents[2] / "src/weft/planning/profiles/zen4-2-cores.json"
    document = json.loads(path.read_text("utf-8"))
    for name, value in fields.items():
        *parts, last = name.split("__")
        target = document
        for part in parts:
            target = target[part]
        target[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "not a machine profile"),
        ('{"a": 1}', "not a machine profile"),
        (changed(weft_profile=2), "version 2, and weft"),
        (changed(speed=1), "unknown field 'speed'"),
        (changed(costs__colour=1), "unknown field 'costs.colour'"),
        (changed(room__rooms=1), "unknown field 'room.rooms'"),
        (changed(room={}), "missing required field"),
        (changed(room__num_blocks=0), "num_blocks is 0"),
        (changed(room__num_blocks="many"), "Expected `int`"),
        (changed(costs__base=-1), "a number below 0"),
        (changed(costs__table=[[1, 1.0]]), "does not begin at 0"),
        (changed(costs__table=[[0, 0.0], [2, 1.0], [4, 0.5]]), "seconds that fall"),
        (changed(room__num_blocks=10**12), "num_blocks is 1000000000000"),
        (changed(room__swap_blocks=10**12), "swap_blocks is 1000000000000"),
        (changed(room__recompute_seconds_per_token=math.nan), "recompute_seconds_per_token is nan"),
        (changed(request_seconds=math.nan), "request_seconds is nan"),
        (changed(request_seconds=math.inf), "request_seconds is inf"),
        (changed(request_seconds=1e300), "request_seconds is 1e+300"),
        (changed(request_seconds=-5), "request_seconds is -5"),
        (changed(costs__noise=[[0.0, [1.0]], [math.inf, [1.0]]]), "noise"),
        (changed(costs__noise=[]), "noise"),
        (changed(costs__noise=[[0.0, [0.0]]]), "noise"),
    ],
)
def test_a_profile_with_a_mistake_is_refused_with_one_line(text: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_profile(text, "my.json")
    message = str(caught.value)
    assert message.startswith("my.json: ") and words in message and "\n" not in message


def test_a_missing_profile_names_those_that_come_with_weft(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"No such file or directory; .*zen4-2-cores"):
        read_profile(str(tmp_path / "none.json"))


def test_the_cost_table_is_linear_between_its_knots_and_beyond_the_last() -> None:
    costs = MeasuredCosts(1.0, ((0, 0.0), (2, 4.0), (4, 5.0)), 0.1, 0.01, 0.001, 0.002)
    assert [costs.linear_seconds(count) for count in (0, 1, 2, 3, 4, 6)] == [0.0, 2.0, 4.0, 4.5, 5.0, 6.0]
    assert costs.of(StepShape(3, 2, 10, 100)) == pytest.approx(1 + 4.5 + 0.2 + 0.1 + 0.1)
    assert costs.of(StepShape(3, 2, 10, 100, 5)) == pytest.approx(1 + 4.5 + 0.2 + 0.05 + 0.01 + 0.1)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("policy", "write a setting and values"),
        ("colour=red", "there is no setting 'colour'"),
        ("policy=fast", "engine.scheduler.policy is 'fast'"),
        ("max_chunk_tokens=0", "max_chunk_tokens is 0"),
        (f"max_running={','.join(map(str, range(1, 400)))}", "399 combinations"),
    ],
)
def test_a_sweep_with_a_mistake_is_refused_with_one_line(part: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_sweep([part])
    assert words in str(caught.value) and "\n" not in str(caught.value)
