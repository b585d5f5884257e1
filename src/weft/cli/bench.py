"""`weft bench`: what each measurement takes and says. The work is imported inside the command that needs it."""

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]

bench_app = typer.Typer(
    help="Measure the engine, and any server of the OpenAI API.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bench_app.command("serve")
def bench_serve(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server, such as http://127.0.0.1:8000.")],
    clients: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="N clients, each asks again when answered; default: 8."),
    ] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="R", help="Poisson arrivals, R requests a second.")
    ] = None,
    rates: Annotated[
        str | None, typer.Option(metavar="R,R,...", help="A sweep over rates, to see where latency bends.")
    ] = None,
    burst: Annotated[int | None, typer.Option(min=1, metavar="N", help="N requests at once ...")] = None,
    every: Annotated[str, typer.Option(metavar="TIME", help="... again after this time.")] = "1s",
    trace: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="JSON lines with at (seconds), prompt (text or ids), max_tokens."),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(metavar="W,W,...", help="W1, W8, W32, Wmix, Wshare, Wshare-warm, or 'all' of them."),
    ] = None,
    requests: Annotated[
        int, typer.Option("--requests", "-n", min=1, metavar="N", help="How many, at each rate.")
    ] = 64,
    prompt_tokens: Annotated[
        str, typer.Option(metavar="N", help="Length of the prompts; 16-512 draws it evenly.")
    ] = "128",
    max_tokens: Annotated[str, typer.Option(metavar="N", help="Length of the answers, likewise.")] = "128",
    ttft: Annotated[
        str | None, typer.Option(metavar="TIME", help="Target for the first token, such as 500ms.")
    ] = None,
    itl: Annotated[
        str | None, typer.Option(metavar="TIME", help="Target for 99% of a request's gaps between tokens.")
    ] = None,
    e2e: Annotated[str | None, typer.Option(metavar="TIME", help="Target for the whole answer.")] = None,
    warm_up: Annotated[int, typer.Option(min=0, metavar="N", help="Requests before the measured ones.")] = 2,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of arrivals and lengths.")] = 0,
    run: Annotated[
        int, typer.Option(min=0, metavar="N", help="Another number takes other text, so that no cache helps.")
    ] = 0,
    tokenizer: Annotated[
        str, typer.Option(metavar="MODEL", help="Makes the prompts; the model that is served.")
    ] = "default",
    served_model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Its name in requests; default: the first listed.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask /v1/chat/completions, in text.")] = False,
    api_key: Annotated[
        str | None, typer.Option(envvar="WEFT_API_KEY", metavar="KEY", help="Sent as a bearer token.")
    ] = None,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="A request fails after this.")] = "600s",
    json: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write all that was measured as JSON.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write a report with plots as one HTML file.")
    ] = None,
) -> None:
    """Load any server and see what its clients see.

    It has to speak the OpenAI API. Exit code 1: some requests failed.
    """
    from weft.bench.serve import main as run_bench
    from weft.bench.serve import parse_duration, parse_lengths, parse_rates
    from weft.bench.serve_measure import Targets
    from weft.bench.serve_run import Work

    is_answered = run_bench(
        url,
        work=Work(
            clients=clients,
            rates=(*parse_rates(rate, "--rate"), *parse_rates(rates, "--rates")),
            burst=burst,
            every=parse_duration(every, "--every") or 1.0,
            trace=trace,
            workloads=tuple(workload.split(",")) if workload else (),
            requests=requests,
            prompt_tokens=parse_lengths(prompt_tokens, "--prompt-tokens"),
            max_tokens=parse_lengths(max_tokens, "--max-tokens"),
            warm_up=warm_up,
            seed=seed,
            run=run,
        ),
        targets=Targets(
            parse_duration(ttft, "--ttft"), parse_duration(itl, "--itl"), parse_duration(e2e, "--e2e")
        ),
        tokenizer=tokenizer,
        served_model=served_model,
        chat=chat,
        api_key=api_key,
        timeout=parse_duration(timeout, "--timeout") or 600.0,
        json_path=json,
        html_path=html,
    )
    if not is_answered:
        raise typer.Exit(1)


@bench_app.command("overhead")
def bench_overhead(json: AsJson = False) -> None:
    """Time what HTTP adds to the engine.

    On a server of its own that computes nothing.
    """
    from weft.bench.overhead import main as run

    run(json=json)


@bench_app.command("gpu")
def bench_gpu(
    shape: Annotated[
        list[str], typer.Option(metavar="S,S,...", help="0.6b, 8b, tiny; default: the first two.")
    ] = [],  # noqa: B006  (typer makes a new one)
    work: Annotated[
        list[str],
        typer.Option(
            metavar="W,W,...",
            help="start, single, batch8, batch64, batch256, offline256, prefill32x2048, long16x3500; default: all.",
        ),
    ] = [],  # noqa: B006
    device: Annotated[
        str, typer.Option(metavar="NAME", help="cuda, or cpu to see whether it runs.")
    ] = "cuda",
    invariant: Annotated[
        bool, typer.Option("--invariant", help="Answers that do not depend on what else is in the batch.")
    ] = False,
    step_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Prompt tokens in one step at most.")
    ] = 8192,
    json: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write all that was measured as JSON, line by line.")
    ] = None,
) -> None:
    """Measure the engine on a card.

    Through LLM.generate on models of random weights, beside the recorded figures of vLLM on an H200 and what that card
    allows at best. Some minutes.
    """
    from weft.bench.gpu import main as run

    run(shape, work, device, invariant, step_tokens, json)


@bench_app.command("start")
def bench_start(
    model: Annotated[str, typer.Option("--model", "-m", help="What is served.")] = "default",
    starts: Annotated[int, typer.Option(min=1, metavar="N", help="How often; one more comes before.")] = 5,
    streams: Annotated[
        str, typer.Option(metavar="N,N,...", help="Peak memory with so many streams at once; '' for none.")
    ] = "8,32",
    json: AsJson = False,
) -> None:
    """Time a start of the server.

    From the process to the first token, with what its processes use. Exit code 1: a bar was missed.
    """
    from weft.bench.start import main as run_starts
    from weft.bench.start import parse_streams

    if not run_starts(model, starts, parse_streams(streams), json):
        raise typer.Exit(1)


@bench_app.command("soak")
def bench_soak(
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="URL", help="A server of weft on this machine; none: one of its own is started."
        ),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(metavar="NAME", help="Of its own server: noop computes nothing, cpu the real model."),
    ] = "noop",
    model: Annotated[str, typer.Option("--model", "-m", help="Of its own server.")] = "default",
    clients: Annotated[int, typer.Option(min=1, metavar="N", help="At once.")] = 64,
    seconds: Annotated[float, typer.Option(min=1, metavar="S", help="How long they ask.")] = 30.0,
    kills: Annotated[
        int, typer.Option(min=0, metavar="N", help="How often the engine's process is killed.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of all that is drawn.")] = 0,
    api_key: Annotated[
        str | None, typer.Option(envvar="WEFT_API_KEY", metavar="KEY", help="Sent as a bearer token.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write all that was seen as JSON.")
    ] = None,
) -> None:
    """Storm a server and check every answer.

    Its clients leave, stall, err and are cut off. Exit code 1: an answer was wrong, something was left behind, or a bar
    was missed.
    """
    from weft.bench.soak import SoakWork
    from weft.bench.soak import main as run_soak

    work = SoakWork(url, backend, model, clients, seconds, kills, seed, api_key)
    if not run_soak(work, json):
        raise typer.Exit(1)
