"""The text side of a model: its tokenizer and its chat template, whatever files they come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.errors import InvalidRequestError, ModelFileError
from weft.loading.checkpoint import Checkpoint
from weft.text.chat_template import ChatTemplate
from weft.text.folder_tokenizer import read_folder_tokenizer
from weft.text.gguf_tokenizer import tokenizer_of
from weft.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ModelText:
    """`chat_template` is None for a model that was not made for conversations."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None

    def close(self) -> None:
        """End the process that renders templates."""
        if self.chat_template is not None:
            self.chat_template.close()

    def require_chat_template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise InvalidRequestError(
                "the model has no chat template; give it plain prompts (`weft generate` without --chat), or, to a server, "
                "a template with --chat-template",
                field="messages",
            )
        return self.chat_template


def open_model_text(checkpoint: Checkpoint, chat_template: str | Path | None = None) -> ModelText:
    """Tokenizer and chat template of a model; errors name its path. `chat_template` is the path of a template to be used
    instead of the model's own."""
    if checkpoint.vocabulary is None:
        tokenizer = read_folder_tokenizer(checkpoint.path)
    try:
        if checkpoint.vocabulary is not None:
            tokenizer = tokenizer_of(checkpoint.vocabulary)
        if chat_template is None:
            has_template = bool(tokenizer.specials.chat_templates)
            return ModelText(tokenizer, ChatTemplate(tokenizer) if has_template else None)
    except ModelFileError as error:
        raise ModelFileError(f"{checkpoint.path}: {error}") from error
    try:
        sources = {"default": Path(chat_template).read_text("utf-8")}
        return ModelText(tokenizer, ChatTemplate(tokenizer, sources=sources))
    except (OSError, UnicodeDecodeError, ModelFileError) as error:
        raise ModelFileError(f"chat template {chat_template}: {error}") from error
