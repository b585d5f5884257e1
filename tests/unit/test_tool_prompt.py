"""Tools in prompts: described by the template or by weft; and tool histories adapted to the template."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.errors import InvalidRequestError
from weft.loading.checkpoint import open_checkpoint
from weft.loading.gguf import GgufFile
from weft.loading.vocabulary import read_vocabulary
from weft.text.chat_template import ChatTemplate
from weft.text.gguf_tokenizer import tokenizer_of
from weft.text.model_text import ModelText, open_model_text
from weft.text.tool_formats import HERMES, LLAMA3

TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}},
}
HI: Any = [{"role": "user", "content": "hi"}]
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
NO_SYSTEM = "{{ raise_exception('no system') if messages[0].role == 'system' }}" + PLAIN
CALLS = (
    "{{ tools|tojson }}{% for m in messages %}{% for c in m.tool_calls %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments|tojson }}}</tool_call>'
    "{% endfor %}{{ m.content }}{% endfor %}"
)
STRANGE = CALLS.replace("<tool_call>", "<call/>").replace('"name": "', '"function": "')


def call(call_id: str = "call_1", name: str = "look", arguments: str = '{"at": 1}') -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.fixture
def text_of(default_model_file: GgufFile) -> Iterator[Any]:
    opened: list[ModelText] = []

    def open_with(source: str, tool_format: str | None = None) -> ModelText:
        vocabulary = replace(read_vocabulary(default_model_file.metadata), chat_templates={"default": source})
        tokenizer = tokenizer_of(vocabulary)
        opened.append(ModelText(tokenizer, ChatTemplate(tokenizer), tool_format))
        return opened[-1]

    yield open_with
    for text in opened:
        text.close()


def prompt(text: ModelText, messages: Any, tools: Any = None) -> str:
    return text.tokenizer.decode(text.encode_chat(messages, tools=tools), skip_control=False)


def test_a_template_that_supports_tools_describes_them(text_of: Any) -> None:
    text = text_of(CALLS)
    assert not text.uses_weft_tool_prompt and text.tool_format is HERMES
    assert prompt(text, HI, [TOOL]).startswith('[{"type": "function"')


@pytest.mark.parametrize(
    ("source", "tool_format"), [(PLAIN, None), (STRANGE, None), (CALLS, "weft"), (PLAIN, "llama3")]
)
def test_with_other_templates_weft_describes_tools_in_a_system_message(
    text_of: Any, source: str, tool_format: str | None
) -> None:
    text = text_of(source, tool_format)
    assert text.uses_weft_tool_prompt and text.tool_format is HERMES
    assert '\n{"name": "look", "description": "Looks.", "parameters": {"type": "object"}}\n' in prompt(
        text, HI, [TOOL]
    )


def test_without_system_messages_the_first_message_describes_the_tools(text_of: Any) -> None:
    text = text_of(NO_SYSTEM)
    rendered = prompt(text, HI, [TOOL])
    assert rendered.startswith("<user>You can call")
    assert '"look"' in rendered and rendered.endswith("\n\nhi</user>")


def test_the_setting_names_a_format_that_cannot_be_detected(text_of: Any) -> None:
    text = text_of(STRANGE, "llama3")
    assert not text.uses_weft_tool_prompt and text.tool_format is LLAMA3


def test_an_unknown_tool_format_is_refused(default_model_path: Path) -> None:
    with pytest.raises(
        InvalidRequestError, match="tool_format is 'banana'; allowed: hermes, llama3, mistral"
    ):
        open_model_text(open_checkpoint(default_model_path), tool_format="banana")


def test_without_tools_the_prompt_is_unchanged(text_of: Any) -> None:
    assert prompt(text_of(PLAIN), HI) == prompt(text_of(PLAIN), HI, []) == "<user>hi</user>"


@pytest.mark.parametrize("tools", [[{}], [{"function": 3}], ["look"], "look"])
def test_tools_without_a_name_are_refused(text_of: Any, tools: Any) -> None:
    with pytest.raises(InvalidRequestError) as error:
        text_of(PLAIN).encode_chat(HI, tools=tools)
    assert error.value.field == "tools"


@pytest.mark.parametrize("calls", [[{}], [{"function": {}}], ["look"], "look"])
def test_calls_without_a_name_are_refused(text_of: Any, calls: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[1\]") as error:
        text_of(PLAIN).encode_chat([*HI, {"role": "assistant", "tool_calls": calls}])
    assert error.value.field.startswith("messages")


ONE_CALL = (
    "{{ tools|tojson }}{% for m in messages %}"
    "{{ raise_exception('one call') if m.tool_calls and m.tool_calls|length > 1 }}"
    """{% for c in m.tool_calls %}{{ '\\n{"name": "' }}{{ c.function.name }}", "parameters": """
    "{{ c.function.arguments|tojson }}}{% endfor %}[{{ m.content }}]{% endfor %}"
)


def test_several_calls_are_split_for_a_template_that_allows_one_per_message(text_of: Any) -> None:
    history = [
        *HI,
        {"role": "assistant", "content": "so", "tool_calls": [call("a"), call("b", "see", "{}")]},
        {"role": "tool", "tool_call_id": "b", "content": "B"},
        {"role": "tool", "tool_call_id": "a", "content": "A"},
        {"role": "tool", "tool_call_id": "c", "content": "C"},
        {"role": "user", "content": "on"},
    ]
    text = text_of(ONE_CALL)
    assert text.tool_format is LLAMA3
    rendered = prompt(text, history, [TOOL]).partition("[hi]")[2]
    assert rendered == (
        '\n{"name": "look", "parameters": {"at": 1}}[so][A]\n{"name": "see", "parameters": {}}[][B][C][on]'
    )


def test_call_ids_are_shortened_for_mistral_and_still_match_their_results(text_of: Any) -> None:
    source = (
        "{{ tools|tojson }}{% for m in messages %}{% for c in m.tool_calls %}[TOOL_CALLS]"
        '[{"name": "{{ c.function.name }}", "id": {{ c.id|tojson }}}]{% endfor %}'
        "{{ '[' + m.tool_call_id + ']' if m.role == 'tool' }}{% endfor %}"
    )
    history = [
        *HI,
        {"role": "assistant", "tool_calls": [call("call_123456"), call("abc456789")]},
        {"role": "tool", "tool_call_id": "call_123456", "content": "A"},
        {"role": "tool", "tool_call_id": "abc456789", "content": "B"},
    ]
    rendered = prompt(text_of(source), history)
    short = rendered.partition('"id": "')[2][:9]
    assert short.isalnum() and rendered.count(short) == 2 and rendered.count("abc456789") == 2
