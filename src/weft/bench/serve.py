"""`weft bench serve`: load-tests a server and reports what its clients see."""

from __future__ import annotations

import asyncio
import math
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from weft.bench.serve_api import APIS, Api
from weft.bench.serve_client import Client
from weft.bench.serve_html import write_html
from weft.bench.serve_load import Lengths, Text
from weft.bench.serve_measure import Targets
from weft.bench.serve_report import print_report, write_json
from weft.bench.serve_run import Work, measure, plan
from weft.errors import InvalidRequestError
from weft.loading.checkpoint import open_checkpoint
from weft.loading.pull import pull
from weft.text.model_text import open_model_text
from weft.text.tokenizer import Tokenizer


def main(
    url: str,
    *,
    work: Work,
    targets: Targets,
    tokenizer: str,
    served_model: str | None,
    api: str,
    api_key: str | None,
    timeout: float,
    json_path: Path | None,
    html_path: Path | None,
) -> bool:
    """Measures, prints and writes. Returns True if every request was answered."""

    def decode(token_ids: Sequence[int]) -> str:
        return _open_tokenizer(tokenizer).decode(token_ids)

    def text() -> Text:
        known = _open_tokenizer(tokenizer)
        return Text(lambda whole: known.encode(whole, add_bos=False), work.run)

    client = Client(url, api_key)
    report = asyncio.run(
        measure(
            client,
            plan(work, text),
            targets=targets,
            num_warm_up=work.warm_up,
            model=served_model,
            api=parse_api(api),
            decode=decode,
            seconds=timeout,
            print_status=lambda line: print(line, file=sys.stderr, flush=True),
        )
    )
    print_report(report)
    if json_path is not None:
        write_json(report, json_path)
    if html_path is not None:
        write_html(report, html_path)
    return all(phase.summary.answered == phase.summary.requests for phase in report.phases)


def parse_api(name: str) -> Api:
    for api in APIS:
        if api == name:
            return api
    raise InvalidRequestError(f"--api is {name!r}; allowed: {', '.join(APIS)}", field="--api")


def parse_duration(text: str | None, option: str) -> float | None:
    """Parses '250ms' or '2s' to seconds. A bare number is an error: some tools read it as ms, others as s."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s)", text.strip())
    if not found or float(found[1]) == 0:
        raise InvalidRequestError(
            f"{option} is {text!r}; write a time with its unit, such as 250ms or 2s", field=option
        )
    return float(found[1]) / (1000 if found[2] == "ms" else 1)


def parse_lengths(text: str, option: str) -> Lengths:
    """Parses '128', or '16-512' for lengths drawn uniformly from that range."""
    low, dash, high = text.partition("-")
    if not (low.isdecimal() and (high.isdecimal() or not dash)):
        raise InvalidRequestError(f"{option} is {text!r}; write a count such as 128, or 16-512", field=option)
    lengths = Lengths(int(low), int(high) if dash else int(low))
    if not 1 <= lengths.low <= lengths.high:
        raise InvalidRequestError(
            f"{option} goes from {lengths.low} to {lengths.high}; write at least 1, and the larger number last",
            field=option,
        )
    return lengths


def parse_rates(text: str | None, option: str) -> tuple[float, ...]:
    """Parses '4', or '1,2,4,8' for a sweep."""
    if text is None:
        return ()
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise InvalidRequestError(
            f"{option} is {text!r}; write requests per second above 0, such as 4 or 1,2,4,8", field=option
        )
    return rates


@cache
def _open_tokenizer(model: str) -> Tokenizer:
    return open_model_text(open_checkpoint(pull(model))).tokenizer
