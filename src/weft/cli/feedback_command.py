"""`weft feedback`: a client of `/v1/feedback`. It converts feedback to the records that trainers read."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from weft.cli.batch_command import BatchClient, print_hint, print_json
from weft.errors import InvalidRequestError

_PATH = "/v1/feedback"
Record = dict[str, Any]


def export_command(
    form: str, output: Path | None, overwrite: bool, of: str | None, url: str, api_key: str | None
) -> None:
    """Writes one line for each record, the oldest response first."""
    if output is not None and output.exists() and not overwrite:
        raise InvalidRequestError(f"{output} exists; --overwrite replaces it", field="output")
    entries = _entries(BatchClient(url, api_key), of)
    first = next(entries, None)  # an error of the server must not leave an empty file
    count = 0
    with nullcontext(sys.stdout) if output is None else open(output, "w", encoding="utf-8") as target:
        for entry in () if first is None else (first, *entries):
            for record in records(form, entry):
                target.write(json.dumps(record, ensure_ascii=False) + "\n")
                count += 1
    print_hint(f"{count:,} records" + ("" if output is None else f" in {output}"))


def stats_command(of: str | None, url: str, api_key: str | None, as_json: bool) -> None:
    found = BatchClient(url, api_key).send("GET", f"{_PATH}/statistics{_query(key=of)}")
    if as_json:
        print_json(found)
        return
    print(f"{found['responses']:,} responses are kept, {found['bytes']:,} bytes")
    names = ("positive", "negative", "neutral", "corrected")
    print("feedback: " + ", ".join(f"{found[name]:,} {name}" for name in names))


def clear_command(of: str | None, url: str, api_key: str | None, as_json: bool) -> None:
    found = BatchClient(url, api_key).send("DELETE", _PATH + _query(key=of))
    if as_json:
        print_json(found)
    else:
        print(f"{found['responses']:,} responses deleted, with their feedback")


def records(form: str, entry: Record) -> Iterator[Record]:
    """The records of one response in this form."""
    by_prompt: dict[int, list[Record]] = {}
    prompts = entry["prompts"]
    per_prompt = 1 if not prompts else max(1, len(entry["answers"]) // len(prompts))
    for answer in entry["answers"]:
        index = 0 if prompts is None else min(answer["index"] // per_prompt, len(prompts) - 1)
        by_prompt.setdefault(index, []).append(answer)
    for index, answers in by_prompt.items():
        prompt = entry["messages"] if prompts is None else prompts[index]
        tools = {"tools": entry["tools"]} if entry["tools"] else {}
        for record in _FORMS[form](prompt, answers):
            yield {**record, **tools}


def _sft(prompt: Any, answers: list[Record]) -> Iterator[Record]:
    for answer in answers:
        if (good := _good(answer)) is None:
            continue
        if isinstance(prompt, str):
            yield {"prompt": prompt, "completion": good}
        else:
            yield {"messages": [*prompt, good]}


def _dpo(prompt: Any, answers: list[Record]) -> Iterator[Record]:
    """Pairs of a better and a worse answer: a correction and its answer, the best and the worst answer of a prompt."""
    for answer in answers:
        if answer["correction"]:
            yield _pair(prompt, _corrected(answer), answer["output"])
    scored = [one for one in answers if one["score"] is not None and not one["correction"]]
    if scored:
        best, worst = max(scored, key=_score), min(scored, key=_score)
        if best["score"] > 0 > worst["score"]:
            yield _pair(prompt, best["output"], worst["output"])


def _kto(prompt: Any, answers: list[Record]) -> Iterator[Record]:
    for answer in answers:
        if answer["score"]:
            yield {"prompt": prompt, "completion": _turn(answer["output"]), "label": answer["score"] > 0}
        if answer["correction"]:
            yield {"prompt": prompt, "completion": _turn(_corrected(answer)), "label": True}


_FORMS = {"sft": _sft, "dpo": _dpo, "kto": _kto}


def _pair(prompt: Any, chosen: Any, rejected: Any) -> Record:
    return {"prompt": prompt, "chosen": _turn(chosen), "rejected": _turn(rejected)}


def _turn(output: Any) -> Any:
    """The output as trainers read it: the output of a conversation becomes a list of messages."""
    return output if isinstance(output, str) else [output]


def _good(answer: Record) -> Any:
    """The answer to train on: the correction, or an output with a positive score. None: there is neither."""
    if answer["correction"]:
        return _corrected(answer)
    return answer["output"] if answer["score"] is not None and answer["score"] > 0 else None


def _corrected(answer: Record) -> Any:
    if isinstance(answer["output"], str):
        return answer["correction"]
    return {"role": "assistant", "content": answer["correction"]}


def _score(answer: Record) -> float:
    return float(answer["score"])


def _entries(client: BatchClient, of: str | None) -> Iterator[Record]:
    after = None
    while True:
        page = client.send("GET", _PATH + _query(limit=100, order="asc", after=after, key=of))
        yield from page["data"]
        if not page["has_more"]:
            return
        after = page["last_id"]


def _query(**given: Any) -> str:
    return "?" + urlencode({name: value for name, value in given.items() if value is not None})
