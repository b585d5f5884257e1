"""Calls and results of earlier turns, as templates get them: every message once, each result after its call."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.text.messages import with_known_forms
from weft.text.tool_formats import FORMATS, LLAMA3, MISTRAL, SHORT_ID
from weft.text.tool_history import adapt_tool_history, results_in_call_order, sorted_by_name

Message = dict[str, Any]


def call(name: str, call_id: Any = None) -> Message:
    made = {"type": "function", "function": {"name": name, "arguments": "{}"}}
    return made if call_id is None else {"id": call_id, **made}


def calls(*made: Message) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": list(made)}


def result(content: str, call_id: Any = None) -> Message:
    made = {"role": "tool", "content": content}
    return made if call_id is None else {**made, "tool_call_id": call_id}


def test_results_follow_the_order_of_the_calls_and_unknown_ones_come_last() -> None:
    message = calls(call("f", "1"), call("g", "2"))
    ordered = results_in_call_order([message, result("x", "9"), result("b", "2"), result("a", "1")])
    assert [one["content"] for one in ordered[1:]] == ["a", "b", "x"]
    other = [message, result("a", "1"), {"role": "user", "content": "q"}, result("b", "2")]
    assert results_in_call_order(other) == other, "results of another turn stay there"


def test_results_without_ids_keep_their_order_and_answer_the_calls_in_it() -> None:
    messages = [calls(call("f"), call("g")), result("a"), result("b")]
    assert results_in_call_order(messages) == messages
    first, a, second, b = adapt_tool_history(messages, LLAMA3)
    assert (a["content"], b["content"]) == ("a", "b")
    assert a["tool_call_id"] == first["tool_calls"][0]["id"] != second["tool_calls"][0]["id"]


def test_calls_with_the_same_id_get_one_result_each() -> None:
    messages = [calls(call("f", "1"), call("g", "1")), result("a", "1"), result("b", "1"), result("c", "1")]
    adapted = adapt_tool_history(messages, LLAMA3)
    assert [one.get("content") for one in adapted] == ["", "a", "", "b", "c"]


def test_a_short_id_is_kept_and_a_long_one_is_the_same_for_call_and_result() -> None:
    long = "call_0123456789abcdef01234567"
    messages = [calls(call("f", "abcDEF123"), call("g", long)), result("a", "abcDEF123"), result("b", long)]
    message, *results = adapt_tool_history(messages, MISTRAL)
    ids = [one["id"] for one in message["tool_calls"]]
    assert ids == [one["tool_call_id"] for one in results] and ids[0] == "abcDEF123" != ids[1]
    assert all(SHORT_ID.fullmatch(one) for one in ids)
    later, _ = adapt_tool_history([calls(call("g", long)), result("b", long)], MISTRAL)
    assert later["tool_calls"][0]["id"] == ids[1], "the same in every request, so that its prefix is found"


ids = st.sampled_from([None, "", "1", "2", "123456789", "call_0123456789", 5, ["1"], {}])
histories = st.lists(
    st.one_of(
        st.builds(lambda text: {"role": "user", "content": text}, st.text(max_size=2)),
        st.builds(lambda made: calls(*(call("f", one) for one in made)), st.lists(ids, max_size=3)),
        st.builds(lambda one: result("r", one), ids),
        st.sampled_from([5, None, "text", {"role": "assistant", "tool_calls": 7}, {"role": "tool"}]),
    ),
    max_size=8,
)


@given(histories, st.sampled_from([*FORMATS.values()]))
def test_no_call_and_no_result_is_lost_or_repeated(history: list[Any], tool_format: Any) -> None:
    """Also with ids that are missing, repeated or no text."""

    def counted(messages: Any) -> Counter[str]:
        found: Counter[str] = Counter()
        for one in messages:
            found["result"] += isinstance(one, dict) and one.get("role") == "tool"
            found["user"] += isinstance(one, dict) and one.get("role") == "user"
            made = one.get("tool_calls") if isinstance(one, dict) else None
            found["call"] += len(made) if isinstance(made, list) else 0
            found["other"] += not isinstance(one, dict)
        return found

    adapted = adapt_tool_history(results_in_call_order(history), tool_format)
    assert counted(adapted) == counted(history)


def test_an_answer_of_calls_only_gets_an_empty_content() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call("f", "1")]}
    thought = {"role": "assistant", "reasoning_content": "hm"}
    empty: Message = {"role": "assistant", "content": None}
    known = with_known_forms([message, thought, empty], keeps_developer=True)
    assert [one["content"] for one in known] == ["", "", None], "the last one is refused later"


@pytest.mark.parametrize("tools", [None, [], 5, "tools", [5], [{"function": 3}, {"name": "f"}]])
def test_tools_that_are_not_valid_pass_for_the_check_after_it(tools: Any) -> None:
    known = sorted_by_name(tools)
    assert known == tools or sorted(map(str, known or ())) == sorted(map(str, tools))
