"""`python -m benchmarks plan-accuracy` and `plan-scale`: their options and help. A command imports its implementation when it is called."""

from typing import Annotated

import typer

from weft.cli.bench import AsJson


def plan_accuracy(
    profile: Annotated[str, typer.Option(metavar="NAME", help="Of this machine.")] = "zen4-2-cores",
    requests: Annotated[int, typer.Option(min=16, metavar="N", help="Requests of a run.")] = 150,
    runs: Annotated[int, typer.Option(min=1, metavar="N", help="Real runs of each cell.")] = 5,
    workload: Annotated[
        str | None, typer.Option(metavar="W,W,...", help="mixed, shared-prefix, bursty; default: all.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Compare the predictions of `weft plan` with the real server.

    Three workloads at 40, 70 and 95% of capacity. Takes half an hour and needs an idle machine; with --runs 1
    --requests 48, two minutes. Exit code 1: a figure is outside its bar.
    """
    from benchmarks.plan_accuracy import main as run

    names = workload.split(",") if workload else []
    if not run(profile=profile, requests=requests, runs=runs, workloads=names, json=json):
        raise typer.Exit(1)


def plan_scale(
    profile: Annotated[str, typer.Option(metavar="NAME", help="Of the replicas.")] = "h200-8b-derived",
    requests: Annotated[str, typer.Option(metavar="N,N", help="Sizes of the load.")] = "10000,50000",
    replicas: Annotated[int, typer.Option(min=1, metavar="N", help="Replicas.")] = 32,
    rate: Annotated[float, typer.Option(metavar="R", help="Requests per second, for all replicas.")] = 640.0,
    prompt: Annotated[str, typer.Option(metavar="N", help="Prompt tokens after the prefix.")] = "300~3000",
    answer: Annotated[str, typer.Option(metavar="N", help="Answer tokens.")] = "100~800",
    prefix: Annotated[int, typer.Option(min=0, metavar="N", help="Tokens of a shared prefix.")] = 256,
    jobs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Processes; default: all cores.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Time simulations of `weft plan`.

    Shows that the time for a token does not depend on the size of the load, and extrapolates to a million requests.
    """
    from benchmarks.plan_scale import main as run

    run(
        profile=profile,
        requests=[int(part) for part in requests.split(",")],
        replicas=replicas,
        rate=rate,
        prompt=prompt,
        answer=answer,
        prefix=prefix,
        jobs=jobs,
        json=json,
    )
