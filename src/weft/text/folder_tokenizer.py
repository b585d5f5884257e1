"""Reads the tokenizer of a model folder: tokenizer.json, and what the files beside it say about special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from weft.errors import ModelFileError
from weft.text.tokenizer import Specials, Tokenizer, file_errors

# Far above real files: the largest tokenizer.json has some 40 MB, the longest templates some 50 kB.
_LARGEST_JSON, _LARGEST_TEMPLATE = 512 << 20, 2 << 20

_CONFIG, _TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"
_STANDARD = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ADDED_FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")


def read_folder_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in a model folder; errors name the file and the field."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        others = [
            name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (folder / name).is_file()
        ]
        hint = (
            f"there is a {others[0]}, which weft does not read; save the tokenizer once with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            if others
            else "the folder has no tokenizer"
        )
        raise ModelFileError(f"tokenizer.json: missing; {hint}")
    text = _read_text(path, _LARGEST_JSON)
    with file_errors(path.name):
        backend = tokenizers.Tokenizer.from_str(text)
    config = {**_read_json(folder / _TOKENS_MAP), **_read_json(folder / _CONFIG)}
    names = _names(config)
    _add_tokens(backend, config, names)
    bos_id, eos_id = _id_of(backend, names, "bos_token"), _id_of(backend, names, "eos_token")
    _set_post_processor(backend, config, names, bos_id, eos_id)
    ends = frozenset() if eos_id is None else frozenset({eos_id})
    return Tokenizer(backend, Specials(bos_id, eos_id, ends, names, _chat_templates(folder, config)))


def _names(config: dict[str, Any]) -> dict[str, str]:
    """What templates call the special tokens: the standard names, and those the model adds (`image_token`)."""
    extra = config.get("extra_special_tokens")
    named = {**(extra if isinstance(extra, dict) else {})}
    named.update({name: config[name] for name in _STANDARD if config.get(name) is not None})
    return {name: _content(value, name) for name, value in named.items()}


def _content(value: Any, name: str) -> str:
    """A token is its text, or an object with its text."""
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str) or not content:
        raise ModelFileError(f"{_CONFIG}: {name} is {value!r:.80}, expected the text of a token")
    return content


def _add_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], names: dict[str, str]) -> None:
    """Tokens that only the configuration knows, and special ones that tokenizer.json does not mark as such."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict) or not all(key.isdecimal() for key in decoder):
        raise ModelFileError(f"{_CONFIG}: added_tokens_decoder is not a list of tokens by id")
    for key in sorted(decoder, key=int):
        entry = decoder[key]
        content = _content(entry, f"added_tokens_decoder.{key}")
        if content in known:
            continue
        flags = {flag: entry[flag] for flag in _ADDED_FLAGS if isinstance(entry, dict) and flag in entry}
        with file_errors(f"{_CONFIG}: added_tokens_decoder.{key}"):
            token = AddedToken(content, **flags)
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if backend.token_to_id(content) != int(key):
            raise ModelFileError(
                f"{_CONFIG}: added_tokens_decoder.{key} is {content!r:.80}, which has the id "
                f"{backend.token_to_id(content)} in tokenizer.json; the two files belong to different models"
            )
    missing = [text for text in names.values() if text not in known or not known[text].special]
    backend.add_special_tokens(list(dict.fromkeys(missing)))


def _id_of(backend: tokenizers.Tokenizer, names: dict[str, str], name: str) -> int | None:
    return backend.token_to_id(names[name]) if name in names else None


def _set_post_processor(
    backend: tokenizers.Tokenizer,
    config: dict[str, Any],
    names: dict[str, str],
    bos_id: int | None,
    eos_id: int | None,
) -> None:
    """What comes before and after a prompt: the configuration's word, if it has one, goes before tokenizer.json's."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    before = [("bos", bos_id)] if config.get("add_bos_token") and bos_id is not None else []
    after = [("eos", eos_id)] if config.get("add_eos_token") and eos_id is not None else []
    backend.post_processor = processors.TemplateProcessing(
        single=[*(name for name, _ in before), "$A", *(name for name, _ in after)],
        special_tokens=[
            {"id": name, "ids": [token_id], "tokens": [names[f"{name}_token"]]}
            for name, token_id in (*before, *after)
        ],
    )


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """By name. Files of their own go before what tokenizer_config.json holds, as in transformers."""
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: _read_text(path, _LARGEST_TEMPLATE) for name, path in files.items()}
    found = config.get("chat_template")
    if found is None:
        found = _read_json(folder / "chat_template.json").get("chat_template")
    if found is None:
        return {}
    if isinstance(found, str):
        return {"default": found}
    templates = {}
    for entry in found if isinstance(found, list) else [found]:
        if not isinstance(entry, dict) or not all(
            isinstance(entry.get(key), str) for key in ("name", "template")
        ):
            raise ModelFileError(
                f"{_CONFIG}: chat_template is neither a template nor a list of objects with name and template"
            )
        templates[entry["name"]] = entry["template"]
    return templates


def _read_text(path: Path, largest: int) -> str:
    try:
        size = path.stat().st_size
        if size > largest:
            raise ModelFileError(f"{path.name}: {size} bytes; allowed: {largest}")
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path.name}: byte {error.start} is not UTF-8") from error
    except OSError as error:
        raise ModelFileError(f"{path.name}: cannot be read: {error.strerror or error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file that may be missing."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path, _LARGEST_JSON))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path.name}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path.name}: holds {type(value).__name__}, expected an object")
    return value
