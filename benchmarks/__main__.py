"""`python -m benchmarks`: the options of each benchmark. Each command imports its implementation when it is called."""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.bench import AsJson
from weft.cli.entry import run as run_command

app = typer.Typer(
    help="Measure parts of weft, and compare it with other engines. `weft bench` measures servers.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command("scheduler")
def scheduler(
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer repetitions: a look in seconds, not a result to quote.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Time the scheduler's own work in a step.

    Schedule and apply, against running and waiting requests.
    """
    from benchmarks.scheduler import main as run

    run(quick=quick, json=json)


@app.command("batching")
def batching(
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Measure on cuda (or cpu), instead of the cost model.")
    ] = None,
    shape: Annotated[
        list[str], typer.Option(metavar="S,S,...", help="0.6b, 8b, tiny; default: the first two.")
    ] = [],  # noqa: B006  (typer makes a new one)
    json: AsJson = False,
) -> None:
    """Compare continuous and static batching.

    On a cost model and a virtual clock; with --device on models of random weights, as `weft bench gpu` has them.
    """
    if device is not None:
        from benchmarks.batching_measured import main as measure

        measure(device, shape, json)
        return
    from benchmarks.batching import main as run

    run(json=json)


@app.command("criteria")
def criteria(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="default, hf:owner/name, or a path.")
    ] = "default",
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Default: one for each physical core.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Measure the published criteria of batching.

    On a real model: continuous against static, scaling, long among short. Some minutes, on a machine that does nothing
    else.
    """
    from benchmarks.criteria import main as run

    run(model, threads=threads, json=json)


@app.command("perplexity")
def perplexity(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="default, hf:owner/name, or a path.")
    ] = "default",
    text: Annotated[
        Path | None, typer.Option(metavar="PATH", help="UTF-8; default: the topics of Python's own help.")
    ] = None,
    context: Annotated[int, typer.Option(min=16, metavar="N", help="Tokens of a window.")] = 512,
    windows: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="How many; default: 4,096 tokens' worth.")
    ] = None,
    quantize: Annotated[
        str | None, typer.Option(metavar="TYPE", help="int8 or int4, for weights that are stored as floats.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Compare the quality of the kernels, and of a card, with numpy's.

    Perplexity on the same text with the same weights, in f32 there.
    """
    from benchmarks.perplexity import main as run

    run(model, text=text, context=context, windows=windows, quantize=quantize, json=json)


@app.command("kv-cache")
def kv_cache(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="default, hf:owner/name, or a path.")
    ] = "default",
    part: Annotated[
        list[str],
        typer.Option(metavar="P,P,...", help="admission, perplexity, retrieval, speed; default: all."),
    ] = [],  # noqa: B006  (typer makes a new one)
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="What computes.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Default: one for each core.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Of perplexity, UTF-8; default: the topics of Python's own help."),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, metavar="N", help="Of 2,048 tokens of that text.")] = 4,
    facts: Annotated[int, typer.Option(min=1, metavar="N", help="Of retrieval.")] = 100,
    context: Annotated[
        int, typer.Option(min=64, metavar="N", help="Tokens of a context of admission and speed.")
    ] = 4096,
    contexts: Annotated[
        int, typer.Option(min=1, metavar="N", help="That fill the memory of admission with a full cache.")
    ] = 16,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Of speed.")] = 16,
    tail_length: Annotated[
        int, typer.Option(min=1, metavar="N", help="Newest tokens that stay in full precision.")
    ] = 256,
    confirm: Annotated[
        bool, typer.Option("--confirm", help="Compute the contexts of admission too; minutes on a CPU.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write all that was measured as JSON, part by part.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="PATH", help="Draw a chart as PNG.")] = None,
) -> None:
    """Compare a two-tier KV cache with a full one.

    Contexts in the same memory, perplexity, facts read back out of long contexts, and decode speed, in full, in 8 and in 4
    bits. A quarter of an hour on a small CPU. Exit code 1: a bar was missed.
    """
    from benchmarks.kv_cache import Options
    from benchmarks.kv_cache import main as run

    options = Options(context, contexts, batch, windows, facts, tail_length, confirm)
    is_met = run(
        model,
        device=device,
        threads=threads,
        part=part,
        text=text,
        options=options,
        json_path=json,
        plot_path=plot,
    )
    if not is_met:
        raise typer.Exit(1)


@app.command("peers")
def peers(
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="P,P,...",
            help="llama.cpp, openvino, openvino-f16, onnxruntime, vllm, weft-in-process, weft-without-drafts; "
            "default: all but weft-in-process and openvino-f16.",
        ),
    ] = None,
    work: Annotated[
        str | None,
        typer.Option(metavar="W,W,...", help="start, W1, W8, W32, Wmix, Wshare, Wshare-warm; default: all."),
    ] = None,
    home: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where peers are installed; default: peers in WEFT_HOME."),
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep each result there, and go on from what is there.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, metavar="N", help="How often each is measured, in turn; the median counts.")
    ] = 1,
    repeats: Annotated[
        int, typer.Option(min=0, metavar="N", help="How often a run that others disturbed is repeated.")
    ] = 2,
    json: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write all that was measured as JSON.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="PATH", help="Draw a bar chart as PNG.")] = None,
) -> None:
    """Compare with other engines on this machine.

    Installs each into an environment of its own, some GB in all, and runs the same work on each in turn, half an hour.
    Exit code 1: an engine could not be measured.
    """
    from benchmarks.peers import main as run_peers

    is_complete = run_peers(
        peers=peers,
        work=work,
        home=home,
        keep=keep,
        rounds=rounds,
        repeats=repeats,
        json_path=json,
        plot_path=plot,
    )
    if not is_complete:
        raise typer.Exit(1)


@app.command("kernels")
def kernels(
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Default: one for each physical core.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Time the linear layers of the default model.

    Alone, on every instruction set this machine has, beside what it can read and multiply.
    """
    from benchmarks.kernels import main as run

    run(threads=threads, json=json)


@app.command("drafts")
def drafts(
    model: Annotated[str, typer.Option("--model", "-m", help="What is asked.")] = "default",
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="How often everything is asked.")] = 2,
    json: AsJson = False,
) -> None:
    """Time one stream with and without drafts.

    By what is asked, on this machine; answers are compared. Exit code 1: one was another with drafts.
    """
    from benchmarks.drafts import main as run

    if not run(model, rounds, json):
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(app)
