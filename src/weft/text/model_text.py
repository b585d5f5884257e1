"""The text side of a model: its tokenizer, its chat template and its tool format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from weft.errors import InvalidRequestError, ModelFileError
from weft.loading.checkpoint import Checkpoint
from weft.text.chat_template import ChatTemplate, start_templates
from weft.text.folder_tokenizer import read_folder_tokenizer
from weft.text.gguf_tokenizer import tokenizer_of
from weft.text.messages import Message, mentions_tools, with_known_forms
from weft.text.reasoning import ReasoningMarkers
from weft.text.tokenizer import Tokenizer
from weft.text.tool_formats import FORMATS, HERMES, ToolFormat
from weft.text.tool_history import adapt_tool_history, results_in_call_order, sorted_by_name
from weft.text.tool_prompt import with_tools_as_text

WEFT_TOOLS = "weft"
TOOL_FORMATS = (*FORMATS, WEFT_TOOLS)
_TAIL_TOKENS = 32


@dataclass(frozen=True)
class ModelText:
    """`chat_template` is None for a model without one, such as a base model.

    `tool_format_name` is one of TOOL_FORMATS: the format of the model's tool calls, or "weft" for weft's own tool
    prompt. None: the format is detected from the template.
    """

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    tool_format_name: str | None = None

    def close(self) -> None:
        """Ends the process that renders templates."""
        if self.chat_template is not None:
            self.chat_template.close()

    def require_chat_template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise InvalidRequestError(
                "the model has no chat template; use plain prompts (`weft generate` without --chat), or start the "
                "server with --chat-template",
                field="messages",
            )
        return self.chat_template

    @cached_property
    def tool_format(self) -> ToolFormat:
        """The format of the model's tool calls."""
        if self.uses_weft_tool_prompt:
            return HERMES
        assert self.chat_template is not None
        named = FORMATS.get(self.tool_format_name or "")
        return named or self.chat_template.tool_format or HERMES

    @cached_property
    def uses_weft_tool_prompt(self) -> bool:
        """Whether weft describes the tools in a system message.

        It does if the template does not support tools, or if weft does not know the template's tool format.
        """
        template = self.chat_template
        if template is None or self.tool_format_name == WEFT_TOOLS or not template.uses_tools:
            return True
        return self.tool_format_name is None and template.tool_format is None

    @property
    def reasoning(self) -> ReasoningMarkers | None:
        return None if self.chat_template is None else self.chat_template.reasoning

    def prompt_opens_reasoning(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt ends with the opening marker, so that an answer starts inside the reasoning."""
        if self.reasoning is None:
            return False
        tail = self.tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_control=False)
        return tail.rstrip().endswith(self.reasoning.opening)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        reasoning_effort: str | None = None,
    ) -> list[int]:
        """Like `ChatTemplate.encode`, but tools, the role developer and `reasoning_effort` work with every template.

        Tools are sorted by name: the same tools in another order give the same prompt, and so a prefix hit.
        """
        template = self.require_chat_template()
        if reasoning_effort is not None:
            options = {**template.effort_options(reasoning_effort), **options}
        messages = with_known_forms(messages, keeps_developer=template.supports_developer_messages)
        tools = sorted_by_name(tools)
        has_history = mentions_tools(messages)
        if has_history:
            messages = results_in_call_order(messages)
        if (tools or has_history) and self.uses_weft_tool_prompt:
            messages = with_tools_as_text(
                messages, tools, supports_system_messages=template.supports_system_messages
            )
            tools = None
        elif has_history:
            messages = adapt_tool_history(messages, self.tool_format)
        return template.encode(
            messages,
            tools=tools,
            documents=documents,
            options=options,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )


def open_model_text(
    checkpoint: Checkpoint, chat_template: str | Path | None = None, tool_format: str | None = None
) -> ModelText:
    """Opens the tokenizer and chat template of a model. Errors name its path.

    `chat_template` is the path of a template that replaces the model's own.
    """
    if tool_format is not None and tool_format not in TOOL_FORMATS:
        raise InvalidRequestError(
            f"tool_format is {tool_format!r:.80}; allowed: {', '.join(TOOL_FORMATS)}", field="tool_format"
        )
    sources: Mapping[str, str] | None = None
    process = None
    where = f"chat template {chat_template}" if chat_template is not None else str(checkpoint.path)
    with _template_errors(where):
        if chat_template is not None:
            sources = {"default": Path(chat_template).read_text("utf-8")}
        elif checkpoint.vocabulary is not None:
            sources = checkpoint.vocabulary.chat_templates
        if sources:
            process = start_templates(sources)  # compiles in the background while the tokenizer is built
    tokenizer = open_tokenizer(checkpoint)
    if sources is None:
        sources = tokenizer.specials.chat_templates
    with _template_errors(where):
        template = ChatTemplate(tokenizer, sources=sources, process=process) if sources else None
    return ModelText(tokenizer, template, tool_format)


@contextmanager
def _template_errors(where: str) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError, ModelFileError) as error:
        raise ModelFileError(f"{where}: {error}") from error


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Opens only the tokenizer. Errors name the model's path."""
    if not checkpoint.has_text:
        raise ModelFileError(f"{checkpoint.path}: has no tokenizer")
    if checkpoint.vocabulary is None:
        return read_folder_tokenizer(checkpoint.path)
    try:
        return tokenizer_of(checkpoint.vocabulary)
    except ModelFileError as error:
        raise ModelFileError(f"{checkpoint.path}: {error}") from error
