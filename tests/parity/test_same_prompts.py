"""Requests that mean the same give the same prompt, with the chat template of every model family."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_templates import CONVERSATIONS, TOOLS, template_names
from test_tool_formats import FORMATS, model_text

from weft.errors import InvalidRequestError
from weft.text.conversation import EFFORTS, template_messages
from weft.text.messages import items_of
from weft.text.model_text import ModelText

Messages = list[dict[str, Any]]


@pytest.fixture(scope="module")
def texts(llama_cpp_models: Path) -> Iterator[dict[str, ModelText]]:
    made = {
        name: model_text((llama_cpp_models / f"templates_{name}.jinja").read_text("utf-8"))
        for name in template_names(llama_cpp_models)
    }
    for text in made.values():
        # The vocabulary of these tests lacks most words: compare characters.
        text.tokenizer.encode = lambda text, **_: [*map(ord, text)]  # type: ignore[method-assign]
    yield made
    for text in made.values():
        text.close()


def prompt_of(text: ModelText, messages: Messages, **chat: Any) -> list[int] | None:
    """The tokens; None if the template refuses the messages."""
    try:
        return text.encode_chat(messages, **chat)
    except InvalidRequestError:
        return None


def as_parts(messages: Messages) -> Messages:
    return [
        {**one, "content": [{"type": "text", "text": one["content"]}]}
        if isinstance(one["content"], str)
        else one
        for one in messages
    ]


def test_a_string_and_a_list_with_one_part_give_the_same_tokens(texts: dict[str, ModelText]) -> None:
    """For every role, with and without the conversion to items."""
    compared = 0
    for name, text in texts.items():
        for kind, messages in CONVERSATIONS.items():
            plain = prompt_of(text, messages)
            parts = prompt_of(text, as_parts(messages))
            items = prompt_of(text, template_messages(items_of(as_parts(messages))))
            assert plain == parts, (name, kind)
            assert plain == items, (name, kind)
            compared += plain is not None
    assert compared > 10 * len(texts)


def test_a_developer_message_is_never_dropped(texts: dict[str, ModelText]) -> None:
    """A template without the role gets it as system. Qwen's would leave it out without an error."""
    own = set()
    for name, text in texts.items():
        developer, system = (
            prompt_of(text, [{"role": role, "content": "BRIEF"}, {"role": "user", "content": "hi"}])
            for role in ("developer", "system")
        )
        if developer != system:
            own.add(name)
        assert (developer is None) == (system is None), name
        assert developer is None or "BRIEF" in "".join(map(chr, developer)), name
    assert own <= {
        "MiniMax-M3",
        "Reka-Edge",
        "deepseek-ai-DeepSeek-V4",
        "deepseek-ai-DeepSeek-V4-Flash-0731",
        "google-gemma-4-31B-it",
        "google-gemma-4-31B-it-interleaved",
        "openai-gpt-oss-120b",
    }


def test_every_effort_is_rendered_by_every_template(texts: dict[str, ModelText]) -> None:
    question = [{"role": "user", "content": "hi"}]
    switches, levels = set(), set()
    for name, text in texts.items():
        plain = prompt_of(text, question)
        rendered = {effort: prompt_of(text, question, reasoning_effort=effort) for effort in EFFORTS}
        assert (None in rendered.values()) == (plain is None), name
        if rendered["none"] != rendered["high"]:
            switches.add(name)
        if rendered["low"] != rendered["high"]:
            levels.add(name)
    assert {"Qwen-Qwen3-0.6B", "Qwen3.5-4B", "deepseek-ai-DeepSeek-V3.1"} <= switches
    assert {"openai-gpt-oss-120b", "tencent-Hy3"} <= levels and len(switches) > 20


def test_without_effort_a_thinking_template_closes_the_thought(texts: dict[str, ModelText]) -> None:
    question = [{"role": "user", "content": "hi"}]
    text = texts["Qwen-Qwen3-0.6B"]
    for effort in ("none", "minimal"):
        prompt = "".join(map(chr, text.encode_chat(question, reasoning_effort=effort)))
        assert prompt.endswith("<think>\n\n</think>\n\n")
    assert text.encode_chat(question, reasoning_effort="high") == text.encode_chat(question)
    # The template's own option goes first.
    options = {"enable_thinking": True}
    assert text.encode_chat(question, reasoning_effort="none", options=options) == text.encode_chat(question)


def test_tools_in_any_order_give_the_same_tokens(texts: dict[str, ModelText]) -> None:
    question = [{"role": "user", "content": "hi"}]
    for name, text in texts.items():
        assert prompt_of(text, question, tools=TOOLS) == prompt_of(text, question, tools=TOOLS[::-1]), name


def two_calls(first: str | None, second: str | None, results: list[tuple[str | None, str]]) -> Messages:
    calls = [
        {"type": "function", "function": {"name": name, "arguments": "{}"}, **({"id": one} if one else {})}
        for one, name in ((first, "get_weather"), (second, "list_files"))
    ]
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *(
            {"role": "tool", "content": content, **({"tool_call_id": one} if one else {})}
            for one, content in results
        ),
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_calls_and_results_of_other_servers_reach_every_template_that_knows_tools(
    texts: dict[str, ModelText], name: str
) -> None:
    """With ids of any length, in another order, or without ids, each result follows its call."""
    text = texts[name]

    def rendered(first: str | None, second: str | None, results: list[tuple[str | None, str]]) -> str:
        prompt = text.encode_chat(two_calls(first, second, results), tools=TOOLS)
        return "".join(map(chr, prompt))

    long = ("call_0123456789abcdef01234567", "toolu_01A09q90qw90lq917835lq9")
    ordered = rendered(*long, [(long[0], "SUNNY"), (long[1], "FILES")])
    assert ordered == rendered(*long, [(long[1], "FILES"), (long[0], "SUNNY")])
    for prompt in (ordered, rendered(None, None, [(None, "SUNNY"), (None, "FILES")])):
        assert prompt.count("SUNNY") == prompt.count("FILES") == 1
        assert prompt.index("SUNNY") < prompt.index("FILES")
        if text.tool_format.is_single_call:
            assert prompt.index("SUNNY") < prompt.index('"list_files"', prompt.index("hi<"))
    if text.tool_format.has_short_ids:
        ids = re.findall(r"(?<![A-Za-z0-9])[0-9a-f]{9}(?![A-Za-z0-9])", ordered)
        assert len(set(ids)) <= 2 and (not ids or ids.count(ids[0]) >= 1)
        assert not any(one in ordered for one in long)


def test_the_id_that_the_server_made_comes_back_unchanged(texts: dict[str, ModelText]) -> None:
    text = texts["mistralai-Mistral-Nemo-Instruct-2407"]
    made = text.tool_format.new_id()
    prompt = "".join(map(chr, text.encode_chat(two_calls(made, "x" * 30, [(made, "SUNNY")]), tools=TOOLS)))
    assert prompt.count(made) == 2
