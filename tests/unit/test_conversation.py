"""Items of a conversation and the messages that chat templates read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import InvalidRequestError
from weft.text.conversation import Item, Message, Thought, ToolCall, ToolResult, template_messages
from weft.text.messages import items_of

CALL = {"id": "1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}


def roles(items: list[Item]) -> list[str]:
    return [message["role"] for message in template_messages(items)]


def test_a_thought_a_message_and_its_calls_become_one_message() -> None:
    items: list[Item] = [
        Thought("t"),
        Message("assistant", "m"),
        ToolCall("1", "ls", "{}"),
        ToolCall("2", "ls", "{}"),
    ]
    [message] = template_messages(items)
    second = {**CALL, "id": "2"}
    assert message == {
        "role": "assistant",
        "content": "m",
        "reasoning_content": "t",
        "tool_calls": [CALL, second],
    }


@pytest.mark.parametrize(
    "later", [Message("assistant", "again"), Thought("again")], ids=["a message", "a thought"]
)
def test_what_follows_a_message_begins_a_new_one(later: Item) -> None:
    assert roles([Message("assistant", "m"), later]) == ["assistant", "assistant"]
    assert roles([ToolCall("1", "ls", "{}"), later]) == ["assistant", "assistant"]


def test_a_result_ends_the_message_of_its_call() -> None:
    messages = template_messages(
        [ToolCall("1", "ls", "{}"), ToolResult("1", "a.txt"), ToolCall("2", "ls", "{}")]
    )
    assert [message["role"] for message in messages] == ["assistant", "tool", "assistant"]
    assert messages[0]["content"] is None
    assert messages[1] == {"role": "tool", "content": "a.txt", "tool_call_id": "1"}


def test_a_text_is_the_same_as_a_list_with_this_text() -> None:
    assert template_messages([Message("user", ["x"])]) == template_messages([Message("user", "x")])
    assert template_messages([Message("user", ["x", "y"])])[0]["content"] == [
        {"type": "text", "text": "x"},
        {"type": "text", "text": "y"},
    ]


_texts = st.text(max_size=4)
_calls = st.lists(
    st.builds(
        lambda name, call_id: {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": '{"a": 1}'},
        },
        st.sampled_from(["ls", "cat"]),
        st.sampled_from(["1", "2"]),
    ),
    min_size=1,
    max_size=2,
)
_messages = st.one_of(
    st.builds(
        lambda role, text: {"role": role, "content": text}, st.sampled_from(["system", "user", "odd"]), _texts
    ),
    st.builds(lambda text, name: {"role": "user", "content": text, "name": name}, _texts, _texts),
    st.builds(lambda text: {"role": "tool", "content": text, "tool_call_id": "1"}, _texts),
    st.builds(lambda text: {"role": "assistant", "content": text}, _texts),
    st.builds(
        lambda text, thought: {"role": "assistant", "content": text, "reasoning_content": thought},
        _texts,
        _texts,
    ),
    st.builds(
        lambda text, calls: {"role": "assistant", "content": text, "tool_calls": calls},
        st.none() | _texts,
        _calls,
    ),
)


@given(st.lists(_messages, min_size=1, max_size=6))
def test_messages_become_items_and_the_same_messages_again(messages: list[dict[str, Any]]) -> None:
    assert template_messages(items_of(messages)) == messages


def test_arguments_that_are_an_object_become_json() -> None:
    function = {"name": "ls", "arguments": {"path": "é"}}
    [message, call] = items_of(
        [{"role": "assistant", "content": None, "tool_calls": [{"function": function}]}]
    )
    assert message == Message("assistant", None)
    assert call == ToolCall(None, "ls", '{"path": "é"}')


def test_a_call_of_a_custom_tool_becomes_a_call_with_the_argument_input() -> None:
    custom = {"id": "1", "type": "custom", "custom": {"name": "patch", "input": 'a "é"\n'}}
    [_, call] = items_of([{"role": "assistant", "content": None, "tool_calls": [custom]}])
    assert call == ToolCall("1", "patch", '{"input": "a \\"é\\"\\n"}')


def test_a_call_without_a_name_is_refused_with_its_place() -> None:
    broken = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    with pytest.raises(
        InvalidRequestError, match=r"messages\[1\]\.tool_calls\[0\] has no function with a name"
    ):
        items_of([{"role": "user", "content": "x"}, broken])
