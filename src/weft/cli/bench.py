"""`weft bench`: the options and help of each command. A command imports its implementation when it is called."""

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]

bench_app = typer.Typer(
    help="Measure servers, and the engine.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bench_app.command("serve")
def bench_serve(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server, such as http://127.0.0.1:8000.")],
    clients: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Closed loop: N clients, each sends its next request after an answer; default: 8.",
        ),
    ] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="R", help="Open loop: Poisson arrivals, R requests per second.")
    ] = None,
    rates: Annotated[
        str | None, typer.Option(metavar="R,R,...", help="One run per rate, to find where latency bends.")
    ] = None,
    burst: Annotated[int | None, typer.Option(min=1, metavar="N", help="N requests at once ...")] = None,
    every: Annotated[str, typer.Option(metavar="TIME", help="... repeated after this time.")] = "1s",
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="JSON lines with at (seconds), prompt (text or token ids), max_tokens."
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(metavar="W,W,...", help="W1, W8, W32, Wmix, Wshare, Wshare-warm, or 'all' of them."),
    ] = None,
    requests: Annotated[
        int, typer.Option("--requests", "-n", min=1, metavar="N", help="Number of requests, for each rate.")
    ] = 64,
    prompt_tokens: Annotated[
        str, typer.Option(metavar="N", help="Prompt length; 16-512 draws lengths uniformly.")
    ] = "128",
    max_tokens: Annotated[str, typer.Option(metavar="N", help="Answer length, likewise.")] = "128",
    ttft: Annotated[
        str | None, typer.Option(metavar="TIME", help="Target for the time to first token, such as 500ms.")
    ] = None,
    itl: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Target for 99% of the gaps between the tokens of a request."),
    ] = None,
    e2e: Annotated[str | None, typer.Option(metavar="TIME", help="Target for the whole answer.")] = None,
    warm_up: Annotated[
        int, typer.Option(min=0, metavar="N", help="Warm-up requests before the measured ones.")
    ] = 2,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of arrivals and lengths.")] = 0,
    run: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Another number uses other prompts, so that there are no prefix hits."
        ),
    ] = 0,
    tokenizer: Annotated[
        str, typer.Option(metavar="MODEL", help="Tokenizer for the prompts; name the served model.")
    ] = "default",
    served_model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Model name in requests; default: the first that the server lists."
        ),
    ] = None,
    api: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="completions, chat, responses, messages (Anthropic) or ollama. All but completions have text prompts.",
        ),
    ] = "completions",
    api_key: Annotated[
        str | None, typer.Option(envvar="WEFT_API_KEY", metavar="KEY", help="Sent as a bearer token.")
    ] = None,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="A request that takes longer fails.")] = "600s",
    json: Annotated[Path | None, typer.Option(metavar="PATH", help="Write all measurements as JSON.")] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write a report with plots as one HTML file.")
    ] = None,
) -> None:
    """Load-test a server and measure what its clients see.

    Works with any server that has one of the APIs that --api names. Exit code 1: some requests failed.
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
        api=api,
        api_key=api_key,
        timeout=parse_duration(timeout, "--timeout") or 600.0,
        json_path=json,
        html_path=html,
    )
    if not is_answered:
        raise typer.Exit(1)


@bench_app.command("overhead")
def bench_overhead(json: AsJson = False) -> None:
    """Measure what HTTP and a viewer of the live page add to the engine.

    Starts a server with a backend that computes nothing.
    """
    from weft.bench.overhead import main as run

    run(json=json)


@bench_app.command("gpu")
def bench_gpu(
    shape: Annotated[
        list[str], typer.Option(metavar="S,S,...", help="0.6b, 8b, tiny; default: 0.6b,8b.")
    ] = [],  # noqa: B006  (typer makes a new one)
    work: Annotated[
        list[str],
        typer.Option(
            metavar="W,W,...",
            help="start, single, batch8, batch64, batch256, offline256, prefill32x2048, long16x3500; default: all.",
        ),
    ] = [],  # noqa: B006
    device: Annotated[str, typer.Option(metavar="NAME", help="cuda; cpu only tests the command.")] = "cuda",
    invariant: Annotated[
        bool,
        typer.Option(
            "--invariant",
            help="Batch-invariant mode: answers do not depend on the other requests in the batch.",
        ),
    ] = False,
    step_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Most prompt tokens in one step.")
    ] = 8192,
    json: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write all measurements as JSON, after every line.")
    ] = None,
) -> None:
    """Measure the engine on a GPU.

    Runs LLM.generate on models with random weights. Compares with recorded figures of vLLM on an H200, and with the
    limit of that GPU. Takes some minutes.
    """
    from weft.bench.gpu import main as run

    run(shape, work, device, invariant, step_tokens, json)


@bench_app.command("start")
def bench_start(
    model: Annotated[str, typer.Option("--model", "-m", help="The served model.")] = "default",
    starts: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Measured starts; one more comes first and is not counted."),
    ] = 5,
    streams: Annotated[
        str,
        typer.Option(metavar="N,N,...", help="Measure peak memory with N concurrent streams; '' for none."),
    ] = "8,32",
    json: AsJson = False,
) -> None:
    """Time the start of the server.

    From the process start to the first token, with CPU time and memory of its processes. Exit code 1: a criterion was
    missed.
    """
    from weft.bench.start import main as run_starts
    from weft.bench.start import parse_streams

    if not run_starts(model, starts, parse_streams(streams), json):
        raise typer.Exit(1)


@bench_app.command("soak")
def bench_soak(
    url: Annotated[
        str | None,
        typer.Argument(metavar="URL", help="A weft server on this machine; default: a server is started."),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Of the started server: noop computes nothing, cpu the real model."
        ),
    ] = "noop",
    model: Annotated[str, typer.Option("--model", "-m", help="Of the started server.")] = "default",
    clients: Annotated[int, typer.Option(min=1, metavar="N", help="Concurrent clients.")] = 64,
    seconds: Annotated[float, typer.Option(min=1, metavar="S", help="Duration of the load.")] = 30.0,
    kills: Annotated[
        int, typer.Option(min=0, metavar="N", help="How often the engine process is killed.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of requests, behaviour and kills.")] = 0,
    api_key: Annotated[
        str | None, typer.Option(envvar="WEFT_API_KEY", metavar="KEY", help="Sent as a bearer token.")
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="PATH", help="Write all results as JSON.")] = None,
) -> None:
    """Stress a server and check every answer.

    Clients disconnect, read slowly and send invalid requests. Exit code 1: an answer was wrong, a resource leaked, or
    another check failed.
    """
    from weft.bench.soak import SoakWork
    from weft.bench.soak import main as run_soak

    work = SoakWork(url, backend, model, clients, seconds, kills, seed, api_key)
    if not run_soak(work, json):
        raise typer.Exit(1)
