"""Renders messages with a model's chat template, and encodes the result to the tokens of a prompt.

The template runs in a separate process (`template_process`). Control tokens such as `<|im_end|>` in untrusted text
must stay text. `shield` therefore puts marks into them before rendering. The tokenizer removes the marks after it has
matched control tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from types import MappingProxyType
from typing import Any

from weft.errors import InvalidRequestError, ModelFileError
from weft.text.messages import ContentForm, Message, checked_objects, has_tool_calls, normalised_messages
from weft.text.reasoning import ReasoningMarkers, detect_markers
from weft.text.shield import Shield
from weft.text.template_process import TemplateFailed, TemplateProcess
from weft.text.tokenizer import MARK, Tokenizer
from weft.text.tool_formats import ToolFormat, detect_format

_LONGEST_SOURCE = 1 << 20
# Unicode never assigns these characters. The tokenizer is fastest with the first one.
_NONCHARACTERS = [MARK, *(chr(code) for code in range(0xFDD3, 0xFDF0))]
_PROBE = "probe"
# Templates read a tool as in the OpenAI API, or in an older form, in which the tool itself has the fields of the
# function. The probe has both forms.
_PROBE_FUNCTION = {"name": _PROBE, "description": _PROBE, "parameters": {"type": "object", "properties": {}}}
_PROBE_TOOL = {"type": "function", "function": _PROBE_FUNCTION, **_PROBE_FUNCTION}
_LEVELS = {
    "none": ("none", "no_think", "low"),
    "minimal": ("minimal", "no_think", "low"),
    "low": ("low",),
    "medium": ("medium", "high"),
    "high": ("high",),
    "xhigh": ("xhigh", "max", "high"),
    "max": ("max", "high"),
}
"""Effort (`conversation.EFFORTS`) -> the levels that come closest to it, best first."""
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


@dataclass(frozen=True)
class _Chat:
    """The untrusted input of one prompt."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ChatTemplate:
    """The compiled chat templates of one model. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        now: Callable[[], datetime] = datetime.now,
        sources: Mapping[str, str] | None = None,
        process: TemplateProcess | None = None,
    ) -> None:
        """`sources` replaces the templates of the model's files. `process`, if given, was started with them."""
        sources = tokenizer.specials.chat_templates if sources is None else sources
        self._process = process or start_templates(sources)
        self._tokenizer = tokenizer
        self._now = now
        self._sources = sources
        self._shields = {name: _shield(tokenizer, source) for name, source in sources.items()}
        try:
            self._process.check_compiled()
        except TemplateFailed as error:
            raise ModelFileError(f"chat_template: {error}") from error

    def render(self, messages: Sequence[Message], **chat: Any) -> str:
        """The prompt as readable text, without marks. Takes the arguments of `encode`."""
        text, mark = self._render(_Chat(messages, **chat))
        return text.replace(mark, "")

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """The prompt as token ids. Only the template itself can produce control tokens.

        `options` are variables for the template, such as `enable_thinking`.
        """
        chat = _Chat(messages, tools, documents, options, add_generation_prompt, continue_final_message)
        text, mark = self._render(chat)
        # The template itself writes the BOS token, if the model needs one.
        return self._tokenizer.encode(text, allow_control=True, add_bos=False, mark=mark)

    @property
    def source(self) -> str:
        """The template for chats without tools, if there are several."""
        return self._sources.get("default") or next(iter(self._sources.values()))

    @cached_property
    def uses_tools(self) -> bool:
        """Whether the template puts tools into the prompt. Found by a probe, without and with a system message."""
        name = "tool_use" if "tool_use" in self._sources else "default"
        chat = [{"role": role, "content": "hello"} for role in ("system", "user")]
        probes = [self._probe(name, messages, [_PROBE_TOOL]) for messages in (chat[1:], chat)]
        rendered = [text for text in probes if text is not None]
        # If the template rejects both probes, nothing is known. Then it gets the tools: its error reaches the client.
        return not rendered or any(_PROBE in text for text in rendered)

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """The format of the model's tool calls, found by rendering one. None if weft does not know the format."""
        name = "tool_use" if "tool_use" in self._sources else "default"
        arguments = {_PROBE: _PROBE}
        texts = [
            self._probe(name, [{"role": "user", "content": "hello"}, _probe_call(value)], [_PROBE_TOOL])
            for value in (arguments, json.dumps(arguments))
        ]
        return detect_format([text for text in texts if text is not None])

    @cached_property
    def supports_system_messages(self) -> bool:
        """Whether the template puts a system message into the prompt."""
        rendered = self._probe_chat(("system", _PROBE), ("user", "hello"))
        return rendered is not None and _PROBE in rendered

    @cached_property
    def reasoning(self) -> ReasoningMarkers | None:
        """The markers around the model's reasoning. None if its template has none."""
        return detect_markers(self._sources.values())

    @cached_property
    def supports_developer_messages(self) -> bool:
        """Whether the template knows the role developer. Other templates drop such a message, refuse it, or write a role
        that the model has never seen."""
        rendered = self._probe_chat(("developer", _PROBE), ("user", "hello"))
        return self._quotes("developer") and rendered is not None and _PROBE in rendered

    def effort_options(self, effort: str) -> dict[str, Any]:
        """The options of the template for a reasoning effort: its switch for thoughts and its level, if it has them.

        The lowest two efforts turn thoughts off. Where only levels exist, they mean the lowest level.
        """
        thinks = effort not in ("none", "minimal")
        options: dict[str, Any] = {} if self._thinking_switch is None else {self._thinking_switch: thinks}
        if self._has_effort_levels and (thinks or not options):
            options["reasoning_effort"] = self._levels[effort]
        return options

    @cached_property
    def _thinking_switch(self) -> str | None:
        """The option that turns thoughts on and off, found by probes."""
        for name in ("enable_thinking", "thinking"):
            if self._changes_prompt({name: True}, {name: False}):
                return name
        return None

    @cached_property
    def _levels(self) -> dict[str, str]:
        """Effort -> the first level of `_LEVELS` that the template knows, else the last. Templates refuse unknown levels, or
        write any word into the prompt."""

        def fits(level: str) -> bool:
            is_known = level in ("low", "medium", "high") or self._quotes(level)
            return is_known and self._probe_chat(("user", _PROBE), reasoning_effort=level) is not None

        return {effort: next(filter(fits, levels), levels[-1]) for effort, levels in _LEVELS.items()}

    @cached_property
    def _has_effort_levels(self) -> bool:
        """Whether the template has levels of reasoning effort, found by probes."""
        switch = {} if self._thinking_switch is None else {self._thinking_switch: True}
        return self._changes_prompt(
            *({**switch, "reasoning_effort": level} for level in ("low", "high", "max"))
        )

    def _changes_prompt(self, *options: dict[str, Any]) -> bool:
        """Whether some of these options give different prompts. An option that the template refuses does not count."""
        rendered = {self._probe_chat(("user", _PROBE), **one) for one in options}
        return len(rendered - {None}) > 1

    def _quotes(self, word: str) -> bool:
        """Whether the template compares or writes this word."""
        return any(f"'{word}'" in source or f'"{word}"' in source for source in self._sources.values())

    def close(self) -> None:
        """Ends the template's process. Rendering starts it again."""
        self._process.close()

    def _render(self, chat: _Chat) -> tuple[str, str]:
        """The rendered prompt with marks, and the mark character."""
        if not isinstance(chat.options, Mapping):
            raise InvalidRequestError(
                f"the options of the chat template have the type {type(chat.options).__name__}; send an object",
                field="chat_template_kwargs",
            )
        reserved = (_RESERVED | self._tokenizer.specials.names.keys()) & chat.options.keys()
        if reserved:
            raise InvalidRequestError(
                f"{min(reserved)!r} is not an option of the chat template; weft sets it itself",
                field="chat_template_kwargs",
            )
        if chat.continue_final_message and chat.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other; set one of them to false",
                field="continue_final_message",
            )
        tools = checked_objects(chat.tools, "tools")
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise InvalidRequestError(
                "the model's chat template works only with tools; send tools", field="tools"
            )
        if tools and not self.uses_tools:
            raise InvalidRequestError(
                "the model's chat template does not support tools; send none", field="tools"
            )
        try:
            return self._render_with(chat, name, tools, parse_arguments=True)
        except TemplateFailed as error:
            failure = error
        if has_tool_calls(chat.messages):
            # Templates of some families (DeepSeek) concatenate the arguments with text: they need the JSON string.
            try:
                return self._render_with(chat, name, tools, parse_arguments=False)
            except TemplateFailed:
                pass
        raise InvalidRequestError(
            f"the model's chat template refused the messages: {failure}", field="messages"
        ) from failure

    def _render_with(self, chat: _Chat, name: str, tools: Any, parse_arguments: bool) -> tuple[str, str]:
        """Renders the chat once. `parse_arguments`: arguments of calls are objects, not strings of JSON."""
        messages = normalised_messages(
            chat.messages,
            content_form=self._content_forms[name],
            parse_arguments=parse_arguments,
        )
        context = {
            **chat.options,
            "messages": messages,
            "tools": tools,
            "documents": checked_objects(chat.documents, "documents"),
        }
        mark, end = _unused_characters(context)
        try:
            # The keys are variable names. A template cannot output them, so they need no marks.
            marked = {key: self._shields[name].mark(value, mark) for key, value in context.items()}
        except RecursionError as error:
            raise InvalidRequestError(
                "the messages, tools or options are nested too deeply; send them flatter", field="messages"
            ) from error
        if chat.continue_final_message:
            # If the space after `end` is missing in the result, the template trims its messages.
            marked["messages"][-1]["content"] = _with_end(messages[-1], marked["messages"][-1], end + " ")
        text = self._run(name, marked, mark, chat.add_generation_prompt)
        if chat.continue_final_message:
            text = _until_end(text, end)
        return text, mark

    def _run(self, name: str, context: Mapping[str, Any], mark: str, add_generation_prompt: bool) -> str:
        names = self._tokenizer.specials.names
        complete = {**names, **context, "add_generation_prompt": add_generation_prompt}
        return self._process.render(name, complete, mark=mark, now=self._now())

    @cached_property
    def _content_forms(self) -> dict[str, ContentForm]:
        return {name: self._content_form(name) for name in self._sources}

    def _content_form(self, name: str) -> ContentForm:
        """The content form that the template supports, found by probes with a string and with a list of parts."""
        contents = (_PROBE, [{"type": "text", "text": _PROBE}])
        text, parts = (
            self._probe(name, [{"role": "user", "content": content}]) or "" for content in contents
        )
        if _PROBE in text:
            return "either" if text == parts else "text"
        return "parts" if _PROBE in parts else "text"

    def _probe_chat(self, *messages: tuple[str, str], **options: Any) -> str | None:
        """Renders messages (role, text) without tools."""
        name = "default" if "default" in self._sources else "tool_use"
        form = self._content_forms[name]
        chat = [{"role": role, "content": text} for role, text in messages]
        parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in chat]
        return self._probe(name, parts if form == "parts" else chat, **options)

    def _probe(
        self, name: str, messages: list[dict[str, Any]], tools: Any = None, **options: Any
    ) -> str | None:
        """The rendered text; None if the template fails."""
        try:
            return self._run(name, {**options, "messages": messages, "tools": tools}, MARK, True)
        except TemplateFailed:
            return None


def start_templates(sources: Mapping[str, str]) -> TemplateProcess:
    """Starts the process of a model's templates. It compiles them in the background."""
    if not sources:
        raise ModelFileError("chat_template: the model has no chat template; use it without chat")
    for name, source in sources.items():
        if len(source) > _LONGEST_SOURCE:
            raise ModelFileError(
                f"chat_template: {name!r:.80} has {len(source)} characters; allowed: {_LONGEST_SOURCE}"
            )
    if not sources.keys() & {"default", "tool_use"}:
        raise ModelFileError(
            "chat_template: weft needs a template named default or tool_use; "
            f"the model has only {', '.join(sorted(sources))!s:.200}"
        )
    try:
        return TemplateProcess(sources)
    except TemplateFailed as error:
        raise ModelFileError(f"chat_template: {error}") from error


def _shield(tokenizer: Tokenizer, source: str) -> Shield:
    """A shield for control tokens and for user-defined tokens that the template writes to structure the prompt.

    A user-defined token in quotes in the template (`'</think>'`) is excluded: the template searches for it in messages.
    """
    structural = {
        token
        for token in tokenizer.user_defined_tokens.values()
        if token in source and not token.isspace() and not (f"'{token}'" in source or f'"{token}"' in source)
    }
    return Shield({*tokenizer.control_tokens.values(), *structural}, source)


def _probe_call(arguments: Any) -> dict[str, Any]:
    call = {
        "id": "123456789",  # some templates require nine characters
        "type": "function",
        "function": {"name": _PROBE, "arguments": arguments},
    }
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _unused_characters(context: Mapping[str, Any]) -> tuple[str, str]:
    """Two noncharacters that do not occur in `context`. Raises if `context` is not valid JSON."""
    try:
        text = json.dumps(context, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            "the messages contain an unpaired surrogate; send valid Unicode", field="messages"
        ) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"the messages, tools or options are not JSON: {error}", field="messages"
        ) from error
    unused = [character for character in _NONCHARACTERS if character not in text]
    if len(unused) < 2:
        raise InvalidRequestError(
            f"the messages contain {len(_NONCHARACTERS) - len(unused)} different noncharacters of Unicode; "
            f"allowed: {len(_NONCHARACTERS) - 2}",
            field="messages",
        )
    return unused[0], unused[1]


def _with_end(message: Mapping[str, Any], marked: Mapping[str, Any], end: str) -> Any:
    """The marked content of the message to continue, with `end` appended to its text."""
    content = marked.get("content")
    if isinstance(content, str) and message["content"]:
        return content + end
    if isinstance(content, list) and content:
        last = content[-1]
        return [*content[:-1], {**last, "text": last["text"] + end}]
    raise InvalidRequestError(
        "continue_final_message is set, but the last message has no text to continue", field="messages"
    )


def _until_end(text: str, end: str) -> str:
    """The rendered text before the marker `end`, which the caller appended to the last message, with a space after it. If
    the space is missing, the template trims messages. Then the end of the returned text is trimmed too."""
    position = text.rfind(end)
    if position < 0:
        raise InvalidRequestError(
            "continue_final_message is set, but the model's chat template does not output the end of the last message",
            field="continue_final_message",
        )
    is_trimmed = text[position + 1 : position + 2] != " "
    return text[:position].rstrip() if is_trimmed else text[:position]
