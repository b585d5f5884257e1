"""`weft plan` and `weft profile`: their options and help. A command imports its implementation when it is called."""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.batch import Key


def plan(
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile", "-p", metavar="NAME", help="A file of `weft profile`, or a profile of weft."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Requests: a weft event log, OpenAI-style JSON lines, an Azure or Mooncake trace.",
        ),
    ] = None,
    format: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of the trace: auto, weft, openai, azure or mooncake.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Use only the first N requests of the trace.")
    ] = None,
    speed: Annotated[float, typer.Option(metavar="X", help="2: the requests arrive in half the time.")] = 1.0,
    load: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A description of the load as TOML, instead of a trace."),
    ] = None,
    rate: Annotated[float | None, typer.Option(metavar="R", help="Requests per second, Poisson.")] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", "-n", metavar="N", help="Number of requests; default: 1000.")
    ] = None,
    prompt_tokens: Annotated[
        str | None,
        typer.Option(metavar="N", help="New prompt tokens: 128, 16-512, or median and p99: 400~4000."),
    ] = None,
    max_tokens: Annotated[str | None, typer.Option(metavar="N", help="Answer length, likewise.")] = None,
    burst: Annotated[
        int | None, typer.Option(metavar="N", help="N requests at once, at the same rate.")
    ] = None,
    prefix: Annotated[int | None, typer.Option(metavar="N", help="Tokens of a shared prefix.")] = None,
    prefixes: Annotated[int | None, typer.Option(metavar="N", help="Different shared prefixes.")] = None,
    turns: Annotated[
        str | None, typer.Option(metavar="N", help="Requests of a conversation: 3, or 1-6.")
    ] = None,
    pause: Annotated[
        float | None, typer.Option(metavar="S", help="Mean seconds between the requests of a conversation.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Seed of the load and of the step times; default: 0."),
    ] = None,
    ttft: Annotated[
        str | None, typer.Option(metavar="TIME", help="Target for the time to first token, such as 500ms.")
    ] = None,
    itl: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Target for 99% of the gaps between the tokens of a request."),
    ] = None,
    good: Annotated[
        float, typer.Option(metavar="X", help="The fraction of requests that must be within the targets.")
    ] = 0.99,
    replicas: Annotated[
        str | None,
        typer.Option(metavar="N", help="A number, or a range in which the fewest are found; default: 1-64."),
    ] = None,
    autoscale: Annotated[
        str | None, typer.Option(metavar="N-N", help="Fewest and most replicas, by the load.")
    ] = None,
    start_delay: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Until a new replica is ready, with --autoscale; default: 60s."),
    ] = None,
    routing: Annotated[
        str, typer.Option(metavar="NAME", help="prefix: cached blocks count; load: the least load only.")
    ] = "prefix",
    price: Annotated[
        float | None, typer.Option(metavar="X", help="Of one replica for an hour, in any currency.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Settings of the servers, as for `weft serve`.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V,V", help="Try values of a setting, such as policy=adaptive,fcfs; may be repeated."
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, metavar="N", help="Processes; default: all cores.")
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="PATH", help="Write all results as JSON.")] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write a report with plots as one HTML file.")
    ] = None,
    toml: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write the best settings of --sweep as TOML.")
    ] = None,
) -> None:
    """Plan how many replicas a load needs.

    Runs weft's own scheduler, KV cache and routing on a virtual clock, with the step times of a machine profile. Nothing is
    computed, and no server is needed. The same seed gives the same result.

    Exit code 1: the replicas are not enough for the targets; 2: a file or an option is invalid.
    """
    from weft.cli.plan_command import PlanOptions, plan_command

    description = {
        **{"rate": rate, "requests": requests, "prompt_tokens": prompt_tokens, "max_tokens": max_tokens},
        **{"burst": burst, "prefix": prefix, "prefixes": prefixes, "turns": turns, "pause": pause},
    }
    options = PlanOptions(
        profile=profile,
        trace=trace,
        format=format,
        limit=limit,
        speed=speed,
        load=load,
        description=description,
        seed=seed,
        ttft=ttft,
        itl=itl,
        good=good,
        replicas=replicas,
        autoscale=autoscale,
        start_delay=start_delay,
        routing=routing,
        price=price,
        config=config,
        sweep=sweep or [],
        jobs=jobs,
    )
    if not plan_command(options, json, html, toml):
        raise typer.Exit(1)


def profile(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", hidden=True)] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PATH", help="Write the profile to this file.")
    ] = Path("profile.json"),
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Settings of the measured server, as for `weft serve`."),
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="auto|cpu|cuda", help="Where it computes.")] = None,
    log: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Take the steps of this event log; measure nothing.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Take what this running server has learned; measure nothing."),
    ] = None,
    api_key: Key = None,
    machine: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the machine; default: its processor or GPU.")
    ] = None,
) -> None:
    """Measure this machine for `weft plan`.

    Starts a server with MODEL on this machine, puts load on it for about a minute, and writes a profile: the seconds of a step
    as a function of its tokens and of the KV cache that it reads, and the size of the KV cache. Nothing else should run.

    A profile of --url is coarser: a server keeps only sums of its steps.
    """
    from weft.cli.plan_command import profile_command

    profile_command(
        model, output, config=config, device=device, log=log, url=url, api_key=api_key, machine=machine
    )
