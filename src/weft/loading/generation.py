"""What a model's makers suggest for sampling, read from its files into the names of `SamplingParams`.

Only what a file says counts: a default of the program that wrote it is none of the model's. How many tokens to
generate is not taken over either; that is for the caller to say, and the API has defaults of its own.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.errors import InvalidRequestError
from weft.loading.files import field_error
from weft.request import SamplingParams

# Name in the file -> name in `SamplingParams`.
_HUGGINGFACE_NAMES = {
    name: name for name in ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")
}
_GGUF_NAMES = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def huggingface_sampling(path: Path, generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The suggestions of generation_config.json; `path` is for the errors."""
    do_sample = generation_config.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise field_error(path, "do_sample", f"{do_sample!r:.80} is not true or false")
    suggested = _checked(path, generation_config, _HUGGINGFACE_NAMES)
    if do_sample is False:
        # The file's own way to say greedy; a temperature beside it has no effect there either.
        suggested["temperature"] = 0.0
    elif do_sample:
        # To sample without a temperature is to sample at 1.
        suggested.setdefault("temperature", 1.0)
    return suggested


def gguf_sampling(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The suggestions in the metadata of a GGUF file; `path` is for the errors."""
    values = {
        key: _as_meant(value) if isinstance(value, float) else value
        for key, value in metadata.items()
        if key in _GGUF_NAMES
    }
    return _checked(path, values, _GGUF_NAMES)


def _as_meant(value: float) -> float:
    """The file stores 0.7 as the float32 nearest to it; the shortest number that rounds to it is what was meant, and
    what the same model's generation_config.json says."""
    try:
        stored = struct.pack("<f", value)
    except OverflowError:
        return math.copysign(math.inf, value)
    written = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((number for number in written if struct.pack("<f", number) == stored), value)


def _checked(path: Path, values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
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
