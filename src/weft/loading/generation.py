"""Reads a model's default sampling parameters from its files, and gives them the names of `SamplingParams`.

Only explicit values count: transformers' own defaults are not the model's. The token limit is ignored: the request
or the API sets it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.errors import InvalidRequestError
from weft.loading.files import field_error
from weft.request import PARAMETERS, SamplingParams

# Name in the file -> name in `SamplingParams`.
_HUGGINGFACE_NAMES = {name: name for name, each in PARAMETERS.items() if each.in_generation_config}
_GGUF_NAMES = {f"general.sampling.{each.gguf}": name for name, each in PARAMETERS.items() if each.gguf}


def huggingface_sampling(path: Path, generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters in generation_config.json. `path` is for error messages."""
    do_sample = generation_config.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise field_error(path, "do_sample", f"{do_sample!r:.80} is not true or false")
    suggested = _checked(path, generation_config, _HUGGINGFACE_NAMES)
    if do_sample is False:
        # do_sample=false means greedy. As in transformers, a temperature in the same file is ignored.
        suggested["temperature"] = 0.0
    elif do_sample:
        # The default temperature of transformers.
        suggested.setdefault("temperature", 1.0)
    return suggested


def gguf_sampling(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters in the metadata of a GGUF file. `path` is for error messages."""
    values = {
        key: _shortest_decimal(value) if isinstance(value, float) else value
        for key, value in metadata.items()
        if key in _GGUF_NAMES
    }
    return _checked(path, values, _GGUF_NAMES)


def _shortest_decimal(value: float) -> float:
    """The shortest decimal number that rounds to the float32 `value`.

    The file stores 0.7 as the nearest float32, 0.699999988. The author meant 0.7, as in generation_config.json.
    """
    try:
        stored = struct.pack("<f", value)
    except OverflowError:
        return math.copysign(math.inf, value)
    candidates = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((number for number in candidates if struct.pack("<f", number) == stored), value)


def _checked(path: Path, values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The values of a file under the names of `SamplingParams`. Each must be valid."""
    suggested: dict[str, Any] = {}
    for key, name in names.items():
        value = values.get(key)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except InvalidRequestError as error:
            raise field_error(path, key, str(error)) from error
        suggested[name] = value
    return suggested
