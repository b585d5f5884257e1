"""The panels of the Grafana dashboard. `make_monitoring.py` makes the dashboard of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Query:
    expression: str
    """`{$}` stands for the selector of the dashboard's variables, `[$]` for a range that suits the zoom."""
    legend: str


@dataclass(frozen=True)
class Panel:
    """`help` is shown on hover. A stat shows the last value of each query in large type."""

    title: str
    help: str
    unit: str
    queries: tuple[Query, ...]
    is_stat: bool = False
    is_stacked: bool = False
    width: int = 8
    red_above: float | None = None
    """A stat is red above this value, else green."""


def _rate(metric: str, legend: str, by: str = "") -> Query:
    grouped = f" by ({by})" if by else ""
    return Query(f"sum{grouped} (rate(weft:{metric}{{$}}[$]))", legend)


def _ratio(above: str, below: str, legend: str) -> Query:
    return Query(f"sum(rate(weft:{above}{{$}}[$])) / sum(rate(weft:{below}{{$}}[$]))", legend)


def _gauge(metric: str, legend: str, how: str = "sum") -> Query:
    return Query(f"{how} (weft:{metric}{{$}})", legend)


def _quantiles(histogram: str, *shares: float) -> tuple[Query, ...]:
    return tuple(_quantile(histogram, share, f"p{100 * share:g}") for share in shares)


def _quantile(histogram: str, share: float, legend: str, by: str = "") -> Query:
    labels = f"le, {by}" if by else "le"
    return Query(
        f"histogram_quantile({share:g}, sum by ({labels}) (rate(weft:{histogram}_bucket{{$}}[$])))", legend
    )


def _stat(title: str, help: str, unit: str, query: Query, red_above: float | None = None) -> Panel:
    return Panel(title, help, unit, (query,), is_stat=True, width=3, red_above=red_above)


_PARTS = ("queue", "prefill", "decode")
ROWS: Mapping[str, tuple[Panel, ...]] = {
    "Overview": (
        _stat(
            "Engines not ready",
            "Servers whose engine process is down, starts, or does not respond.",
            "short",
            Query("count(weft:engine_up{$}) - sum(weft:engine_up{$})", ""),
            red_above=0,
        ),
        _stat("Running", "Sequences that take part in steps.", "short", _gauge("num_requests_running", "")),
        _stat("Waiting", "Answers that wait to be admitted.", "short", _gauge("num_requests_waiting", "")),
        _stat("Tokens per second", "Generated tokens.", "short", _rate("generation_tokens_total", "")),
        _stat(
            "First token, p95",
            "95 of 100 first tokens came at least this fast.",
            "s",
            _quantile("time_to_first_token_seconds", 0.95, ""),
        ),
        _stat(
            "Gap between tokens, p95",
            "95 of 100 gaps between the tokens of streams were at most this long.",
            "s",
            _quantile("inter_token_latency_seconds", 0.95, ""),
        ),
        _stat(
            "KV cache in use",
            "Fraction of the KV blocks that requests hold, of the fullest server.",
            "percentunit",
            _gauge("kv_cache_usage_perc", "", "max"),
            red_above=0.95,
        ),
        _stat(
            "Engine restarts, 24 h",
            "Restarts of engine processes in the last 24 hours.",
            "short",
            Query("sum(increase(weft:engine_restarts_total{$}[24h]))", ""),
            red_above=0,
        ),
    ),
    "What clients see": (
        Panel(
            "Time to first token",
            "Seconds from the complete request to its first token.",
            "s",
            _quantiles("time_to_first_token_seconds", 0.5, 0.95, 0.99),
        ),
        Panel(
            "Time to first token by priority, p95",
            "A priority without requests has no line.",
            "s",
            (_quantile("time_to_first_token_seconds", 0.95, "{{priority}}", "priority"),),
        ),
        Panel(
            "Gap between tokens by priority, p95",
            "Of streams: seconds between two events, for each token.",
            "s",
            (_quantile("inter_token_latency_seconds", 0.95, "{{priority}}", "priority"),),
        ),
        Panel(
            "Duration of requests",
            "Seconds from the complete request to its last token.",
            "s",
            _quantiles("e2e_request_latency_seconds", 0.5, 0.95, 0.99),
        ),
        Panel(
            "Where the time goes",
            "Mean seconds of an answer in the queue, in prefill and in decode.",
            "s",
            tuple(
                _ratio(f"request_{part}_time_seconds_sum", f"request_{part}_time_seconds_count", part)
                for part in _PARTS
            ),
            is_stacked=True,
        ),
        Panel(
            "Ended answers and errors",
            "Answers per second by finish reason, and failed requests by HTTP status.",
            "reqps",
            (
                _rate("request_success_total", "{{finished_reason}}", "finished_reason"),
                _rate("request_failure_total", "{{status}}", "status"),
            ),
        ),
    ),
    "Load": (
        Panel(
            "Answers",
            "Held: the server holds them back for fairness between keys. Waiting has the held ones.",
            "short",
            (
                _gauge("num_requests_running", "running"),
                _gauge("num_requests_waiting", "waiting"),
                _gauge("num_requests_held", "held"),
                _gauge("http_requests_open", "HTTP requests"),
            ),
        ),
        Panel(
            "Tokens per second",
            "Prompt tokens of completed requests. Cached ones were prefix hits and were not computed.",
            "short",
            (
                _rate("prompt_tokens_total", "prompt"),
                _rate("prefix_cache_hits_total", "prompt, cached"),
                _rate("generation_tokens_total", "generated"),
            ),
        ),
        Panel(
            "Lag of the HTTP process, p99",
            "Delay of its event loop. Above 50 ms the HTTP process is the bottleneck, not the engine.",
            "s",
            (_quantile("event_loop_lag_seconds", 0.99, "p99"),),
        ),
        Panel(
            "Tokens per second by API key",
            "Prompt and generated tokens. Needs a key with admin = true.",
            "short",
            (_rate("key_tokens_total", "{{key}}", "key"),),
            is_stacked=True,
        ),
        Panel(
            "Requests per second by API key",
            "Needs a key with admin = true.",
            "reqps",
            (_rate("key_requests_total", "{{key}}", "key"),),
            is_stacked=True,
        ),
        Panel(
            "Batches",
            "Running batches, their lines in flight, and lines per second by outcome.",
            "short",
            (
                _gauge("batches_running", "batches"),
                _gauge("batch_lines_running", "lines in flight"),
                _rate("batch_lines_total", "{{outcome}} per second", "outcome"),
            ),
        ),
    ),
    "Engine": (
        Panel(
            "Step time by kind, p95",
            "Seconds of a step: with decodes only, with prompts only, with both.",
            "s",
            (_quantile("step_seconds", 0.95, "{{kind}}", "kind"),),
        ),
        Panel(
            "Time in steps by kind",
            "Fraction of the time in which a step runs. Several servers add up.",
            "percentunit",
            (_rate("step_seconds_sum", "{{kind}}", "kind"),),
            is_stacked=True,
        ),
        Panel(
            "Batch size",
            "Mean number of sequences and of tokens in a step.",
            "short",
            (
                _ratio("step_sequences_total", "steps_total", "sequences"),
                _ratio("step_tokens_total", "steps_total", "tokens"),
            ),
        ),
        Panel(
            "Batch occupancy",
            "Fraction of the rows (max_running) in use.",
            "percentunit",
            (_gauge("batch_usage_perc", "{{instance}}", "avg by (instance)"),),
        ),
        Panel(
            "Draft tokens",
            "Fraction of the speculated tokens that were accepted. No line: none were checked.",
            "percentunit",
            (
                _ratio(
                    "spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total", "accepted"
                ),
            ),
        ),
        Panel(
            "Faults",
            "Per second: failed steps and swaps, restarts, stalls, missed targets of first tokens, lost traces.",
            "cps",
            (
                _rate("steps_failed_total", "failed steps"),
                _rate("swaps_failed_total", "failed swaps"),
                _rate("engine_restarts_total", "engine restarts"),
                _rate("engine_stalls_total", "engine stalls"),
                _rate("ttft_targets_missed_total", "missed targets"),
                _rate("traces_lost_total", "lost traces"),
            ),
        ),
    ),
    "KV cache": (
        Panel(
            "KV blocks by state",
            "Used: requests hold them. Cached, hot (kept by a session) and idle (content of idle work) may be evicted.",
            "short",
            (_gauge("kv_cache_blocks", "{{tier}}: {{state}}", "sum by (tier, state)"),),
            is_stacked=True,
        ),
        Panel(
            "Prefix hits",
            "Fraction of the prompt tokens that were in the cache.",
            "percentunit",
            (_ratio("prefix_cache_hits_total", "prompt_tokens_total", "hits"),),
        ),
        Panel(
            "Evicted KV blocks per second",
            "By tier and by the state before. Evicted hot blocks: the cache is too small for the sessions.",
            "cps",
            (_rate("kv_cache_evictions_total", "{{tier}}: {{state}}", "tier, state"),),
        ),
        Panel(
            "Preemptions per second",
            "By cause. Memory: the cache is too small for the running sequences.",
            "cps",
            (
                _rate("num_preemptions_total", "{{cause}}", "cause"),
                _rate("num_preemptions_by_swap_total", "by swap"),
            ),
        ),
        Panel(
            "Swapped bytes per second",
            "Out: to host memory. In: back.",
            "Bps",
            (_rate("swap_bytes_total", "{{direction}}", "direction"),),
        ),
        Panel(
            "Swap slots",
            "Host memory for KV blocks of preempted sequences.",
            "short",
            (_gauge("kv_cache_swap_slots", "{{state}}", "sum by (state)"),),
            is_stacked=True,
        ),
    ),
    "Two-tier KV cache (no data if the cache has one tier)": (
        Panel(
            "Bytes in use",
            "Full: the tails of sequences, and prompts in prefill. Store: older tokens, quantised.",
            "bytes",
            (_gauge("kv_cache_tail_bytes", "full"), _gauge("kv_cache_store_bytes", "store")),
            is_stacked=True,
        ),
        Panel(
            "Compression",
            "Bytes of a full-precision cache for the same tokens, divided by the bytes in use.",
            "short",
            (_gauge("kv_cache_compression_ratio", "{{instance}}", "avg by (instance)"),),
        ),
        Panel(
            "Moved KV blocks per second",
            "From the tail to the store. Shared: without a copy.",
            "cps",
            (
                _rate("kv_cache_migrations_total", "moved"),
                _rate("kv_cache_migrations_shared_total", "shared"),
            ),
        ),
    ),
}
