"""Reads the tokenizer of a model folder: tokenizer.json, the special tokens and the chat templates."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from weft.errors import ModelFileError
from weft.loading.files import field_error, read_json, read_text
from weft.text.tokenizer import SpecialTokens, Tokenizer, file_errors

_STANDARD = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ADDED_FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")


def read_folder_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder. Errors name the file and the field."""
    path = folder / "tokenizer.json"
    if not os.path.lexists(path):
        known = ("tokenizer.model", "vocab.json", "tekken.json")
        others = [name for name in known if (folder / name).is_file()]
        hint = (
            f"weft does not read {others[0]}; convert the tokenizer with transformers: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            if others
            else "the folder has no tokenizer"
        )
        raise ModelFileError(f"{path}: missing; {hint}")
    text = read_text(path)
    with file_errors(str(path)):
        backend = tokenizers.Tokenizer.from_str(text)
    config_path = folder / "tokenizer_config.json"
    config = {**_read_optional(folder / "special_tokens_map.json"), **_read_optional(config_path)}
    names = _names(config_path, config)
    _add_tokens(backend, config_path, config, names)
    _set_post_processor(backend, config, names)
    bos_id = backend.token_to_id(names["bos_token"]) if "bos_token" in names else None
    templates = _chat_templates(config_path, config)
    with file_errors(str(path)):
        return Tokenizer(backend, SpecialTokens(bos_id, names, templates))


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if os.path.lexists(path) else {}


def _names(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Special tokens by the names that templates use: the standard names, and the model's own (`image_token`)."""
    extra = config.get("extra_special_tokens")
    named = {**(extra if isinstance(extra, dict) else {})}
    named.update({name: config[name] for name in _STANDARD if config.get(name) is not None})
    return {name: _content(path, value, name) for name, value in named.items()}


def _content(path: Path, value: Any, name: str) -> str:
    """The text of a token, which is a string or an object with a "content"."""
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str) or not content:
        raise field_error(path, name, f"{value!r:.80} is not the text of a token")
    return content


def _add_tokens(
    backend: tokenizers.Tokenizer, path: Path, config: dict[str, Any], names: dict[str, str]
) -> None:
    """Adds the tokens that only tokenizer_config.json lists. Also marks the tokens in `names` as special."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict) or not all(key.isdecimal() for key in decoder):
        raise field_error(path, "added_tokens_decoder", "is not an object with tokens by id")
    for key in sorted(decoder, key=int):
        entry = decoder[key]
        content = _content(path, entry, f"added_tokens_decoder.{key}")
        if content in known:
            continue
        flags = {flag: entry[flag] for flag in _ADDED_FLAGS if isinstance(entry, dict) and flag in entry}
        with file_errors(f"{path}: added_tokens_decoder.{key}"):
            token = AddedToken(content, **flags)
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if backend.token_to_id(content) != int(key):
            raise field_error(
                path,
                f"added_tokens_decoder.{key}",
                f"is {content!r:.80}, which has the id {backend.token_to_id(content)} in tokenizer.json; "
                "the two files are of different models, download them again",
            )
    missing = [text for text in names.values() if text not in known or not known[text].special]
    backend.add_special_tokens(list(dict.fromkeys(missing)))


def _set_post_processor(backend: tokenizers.Tokenizer, config: dict[str, Any], names: dict[str, str]) -> None:
    """Sets the special tokens before and after a prompt. tokenizer_config.json has precedence over tokenizer.json."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    before, after = (
        [name] if config.get(f"add_{name}") and name in names else [] for name in ("bos_token", "eos_token")
    )
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        special_tokens=[
            {"id": name, "ids": [backend.token_to_id(names[name])], "tokens": [names[name]]}
            for name in (*before, *after)
        ],
    )


def _chat_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """The templates by name. As in transformers, .jinja files have precedence over tokenizer_config.json."""
    folder = path.parent
    files = {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: read_text(file) for name, file in files.items()}
    found = config.get("chat_template")
    if found is None:
        found = _read_optional(folder / "chat_template.json").get("chat_template")
    if found is None:
        return {}
    if isinstance(found, str):
        return {"default": found}
    templates = {}
    for entry in found if isinstance(found, list) else [found]:
        if not isinstance(entry, dict) or not all(
            isinstance(entry.get(key), str) for key in ("name", "template")
        ):
            problem = "is neither a template nor a list of objects with name and template"
            raise field_error(path, "chat_template", problem)
        templates[entry["name"]] = entry["template"]
    return templates
