"""`python -m benchmarks`: the options and help of each command. A command imports its implementation when it is called."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.plan import plan_accuracy, plan_scale
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
        bool,
        typer.Option("--quick", help="Fewer repetitions: takes seconds, but the figures are less reliable."),
    ] = False,
    json: AsJson = False,
) -> None:
    """Time the scheduler on the host.

    Time of schedule and apply per step, by number of running and waiting requests.
    """
    from benchmarks.scheduler import main as run

    run(quick=quick, json=json)


@app.command("idle-work")
def idle_work(
    backend: Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda or noop.")] = "cpu",
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="S", help="Random weights (0.6b, 8b, tiny) and no HTTP; default: the default model."
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Seconds of one round.")] = 20.0,
    rounds: Annotated[int, typer.Option(help="Rounds with and without idle work.")] = 3,
    clients: Annotated[int, typer.Option(help="Interactive clients, each with one request at a time.")] = 2,
    lines: Annotated[int, typer.Option(help="Requests of idle work at once.")] = 16,
    json: AsJson = False,
) -> None:
    """Compare interactive latency with and without a batch beside it.

    Streamed requests over HTTP to a server in this process; first token and gaps, p50 and p99, and their ratio.
    """
    from benchmarks.idle_work import main as run

    run(
        backend=backend,
        shape=shape,
        seconds=seconds,
        rounds=rounds,
        clients=clients,
        lines=lines,
        json=json,
    )


@app.command("coalescing")
def coalescing(
    backend: Annotated[str, typer.Option(metavar="NAME", help="cpu or noop.")] = "cpu",
    requests: Annotated[int, typer.Option(min=2, metavar="N", help="Requests within 100 ms.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of an answer.")] = 48,
    rounds: Annotated[int, typer.Option(min=2, metavar="N", help="Rounds; the order changes.")] = 10,
    json: AsJson = False,
) -> None:
    """Compare identical requests that share one computation with the same requests computed separately.

    Measures time and computed tokens, and how much slower coalescing makes different requests. Exit code 1: a check is not met.
    """
    from benchmarks.coalescing import main as run

    if not run(backend=backend, requests=requests, tokens=tokens, rounds=rounds, json=json):
        raise typer.Exit(1)


@app.command("apis")
def apis(
    backend: Annotated[str, typer.Option(metavar="NAME", help="noop or cpu.")] = "noop",
    rounds: Annotated[int, typer.Option(min=2, metavar="N", help="Rounds; the order changes.")] = 30,
    streams: Annotated[int, typer.Option(min=1, metavar="N", help="Streams at once.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Most tokens of an answer.")] = 128,
    json: AsJson = False,
) -> None:
    """Compare streams of each API with those of chat completions.

    Processor time of the server and time for a token, with 95% intervals. Exit code 1: an API may take more than 5%
    more processor time.
    """
    from benchmarks.apis import main as run

    if not run(backend=backend, rounds=rounds, streams=streams, tokens=tokens, json=json):
        raise typer.Exit(1)


@app.command("memory-index")
def memory_index(
    size: Annotated[int, typer.Option(help="Vectors in the index.")] = 100_000,
    dimensions: Annotated[int, typer.Option(help="Numbers in a generated vector.")] = 384,
    queries: Annotated[int, typer.Option(help="Searches.")] = 1000,
    passages: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A .npy file of real vectors instead of the generator."),
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads that build.")] = 2,
    keep: Annotated[Path | None, typer.Option(metavar="DIR", help="Store the result there, as JSON.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Draw the results in --keep as SVG or PNG.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Measure the index of vector stores.

    Recall at 10 against exact search, latency of a search, build rate, and memory.
    """
    from benchmarks.memory_index import main as run

    run(
        size=size,
        dimensions=dimensions,
        queries=queries,
        passages=passages,
        threads=threads,
        as_json=json,
        keep=keep,
        plot=plot,
    )


@app.command("passages")
def passages(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders with documents.")],
    out: Annotated[Path, typer.Option(metavar="PATH", help="The .npy file to write, or to continue.")],
    count: Annotated[int, typer.Option(min=1, metavar="N", help="Passages; a random part.")] = 105_000,
    tokens: Annotated[int, typer.Option(min=16, metavar="N", help="Tokens of a passage.")] = 128,
    quantize: Annotated[
        str | None, typer.Option(metavar="TYPE", help="int8: faster, with vectors that differ a little.")
    ] = None,
) -> None:
    """Embed real passages for `memory-index`.

    Reads HTML, Markdown, reStructuredText and text files. Takes minutes; continues after an interruption.
    """
    from benchmarks.passages import main as run

    run(folders, out=out, count=count, tokens=tokens, quantize=quantize)


@app.command("batching")
def batching(
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Measure on cuda or cpu instead of a cost model.")
    ] = None,
    shape: Annotated[
        list[str], typer.Option(metavar="S,S,...", help="0.6b, 8b, tiny; default: 0.6b,8b.")
    ] = [],  # noqa: B006  (typer makes a new one)
    json: AsJson = False,
) -> None:
    """Compare continuous and static batching.

    Uses a cost model and a virtual clock; with --device, the models with random weights of `weft bench gpu`.
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

    On a real model: continuous against static batching, scaling, long requests among short ones. Takes some minutes and
    needs an idle machine.
    """
    from benchmarks.criteria import main as run

    run(model, threads=threads, json=json)


@app.command("perplexity")
def perplexity(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="default, hf:owner/name, or a path.")
    ] = "default",
    text: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A UTF-8 file; default: Python's help topics.")
    ] = None,
    context: Annotated[int, typer.Option(min=16, metavar="N", help="Tokens per window.")] = 512,
    windows: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of windows; default: 4,096 tokens in all.")
    ] = None,
    quantize: Annotated[
        str | None, typer.Option(metavar="TYPE", help="int8 or int4, for weights in floating point.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Compare the perplexity of the kernels or of a GPU with numpy.

    All use the same text and weights; numpy computes in f32.
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
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="The backend.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Default: one for each core.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A UTF-8 file for perplexity; default: Python's help topics."),
    ] = None,
    windows: Annotated[
        int, typer.Option(min=1, metavar="N", help="Windows of 2,048 tokens for perplexity.")
    ] = 4,
    facts: Annotated[int, typer.Option(min=1, metavar="N", help="Facts for retrieval.")] = 100,
    context: Annotated[
        int, typer.Option(min=64, metavar="N", help="Tokens of a context for admission and speed.")
    ] = 4096,
    contexts: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Contexts that fill the memory for admission with a full cache."
        ),
    ] = 16,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Batch size for speed.")] = 16,
    tail_length: Annotated[
        int, typer.Option(min=1, metavar="N", help="Newest tokens that stay in full precision.")
    ] = 256,
    confirm: Annotated[
        bool, typer.Option("--confirm", help="Compute the contexts of admission too; takes minutes on a CPU.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write all measurements as JSON, after every part.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="PATH", help="Draw a chart as PNG.")] = None,
) -> None:
    """Compare a two-tier KV cache with a full one.

    Compares a full cache, 8 bits and 4 bits. Measures contexts that fit into the same memory, perplexity, facts
    retrieved from long contexts, and decode speed. Takes a quarter of an hour on a small CPU. Exit code 1: a
    criterion was missed.
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
        typer.Option(
            metavar="W,W,...",
            help="start, W1, W8, W32, Wmix, Wshare, Wshare-warm; default: all. embeddings alone: the same as "
            "`python -m benchmarks embeddings`.",
        ),
    ] = None,
    home: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory of the installed peers; default: peers in WEFT_HOME."),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Store each result there; an interrupted run continues from there."),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Rounds; the engines take turns, and the median counts. Default: 1; of embeddings: 10.",
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=0, metavar="N", help="Repeats of a run that other load disturbed.")
    ] = 2,
    json: Annotated[Path | None, typer.Option(metavar="PATH", help="Write all measurements as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="PATH", help="Draw a bar chart as PNG.")] = None,
) -> None:
    """Compare with other engines on this machine.

    Installs each engine into its own environment, some GB in all, and runs the same workloads on each in turn. Takes half
    an hour. Exit code 1: an engine could not be measured.
    """
    if work == "embeddings":
        embeddings(rounds=rounds or 10, home=home, json=json)
        return
    from benchmarks.peers import main as run_peers

    is_complete = run_peers(
        peers=peers,
        work=work,
        home=home,
        keep=keep,
        rounds=rounds or 1,
        repeats=repeats,
        json_path=json,
        plot_path=plot,
    )
    if not is_complete:
        raise typer.Exit(1)


@app.command("embeddings")
def embeddings(
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Rounds; the engines take turns.")] = 10,
    home: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory of the installed peers; default: peers in WEFT_HOME."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Default: one for each physical core.")
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="PATH", help="Write all measurements as JSON.")] = None,
) -> None:
    """Compare embeddings with other engines on this machine.

    all-MiniLM-L6-v2 in weft, sentence-transformers, onnxruntime and llama.cpp: a batch of 256 texts, and single queries.
    Exit code 1: an engine could not be measured, or weft is not as much faster as the project asks.
    """
    from benchmarks.embeddings import main as run

    if not run(rounds=rounds, home=home, threads=threads, json_path=json):
        raise typer.Exit(1)


@app.command("revisions")
def revisions(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help="A checkout after `make kernels`.")],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="Another one.")] = Path(),
    work: Annotated[
        str | None,
        typer.Option(metavar="W,W,...", help="Any workloads of `peers`; default: W1, W8, W32, Wmix."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=2, metavar="N", help="Rounds; the order alternates.")] = 10,
) -> None:
    """Compare two revisions of weft on this machine.

    Prints the change of each workload with its 95% interval. Takes about a minute a round and needs an idle machine.
    Exit code 1: a workload may be more than 3% slower.
    """
    from benchmarks.revisions import choose_work
    from benchmarks.revisions import main as run

    if not run(before, after, work=choose_work(work), rounds=rounds):
        raise typer.Exit(1)


@app.command("kernels")
def kernels(
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Default: one for each physical core.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Time the linear layers of the default model.

    On every instruction set of this machine, compared with its memory bandwidth and arithmetic.
    """
    from benchmarks.kernels import main as run

    run(threads=threads, json=json)


@app.command("learned")
def learned(
    model: Annotated[str, typer.Argument(help="Name or path.")] = "default",
    requests: Annotated[int, typer.Option(min=16, metavar="N", help="Requests of each trace.")] = 200,
    trace: Annotated[str | None, typer.Option(metavar="NAME", help="Only this trace.")] = None,
    streams: Annotated[int | None, typer.Option(metavar="1|8", help="Only one stream, or only 8.")] = None,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Store the figures there; a chart shows all of them.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="PATH", help="Draw a chart as PNG.")] = None,
    json: AsJson = False,
) -> None:
    """Time requests with and without draft tokens from finished answers.

    Three traces of similar requests, for one stream and for 8, and one trace of unrelated requests. Exit code 1: an answer
    differs, or a criterion was missed.
    """
    from benchmarks.learned import main as run

    if not run(model, requests=requests, trace=trace, streams=streams, keep=keep, plot=plot, as_json=json):
        raise typer.Exit(1)


@app.command("schema-drafts")
def schema_drafts(
    model: Annotated[str, typer.Argument(help="Name or path.")] = "default",
    answers: Annotated[int, typer.Option(min=1, metavar="N", help="Answers in all.")] = 288,
    learned: Annotated[
        bool, typer.Option(help="Whether finished answers give draft tokens too, as usual.")
    ] = True,
    keep: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Append the figures there; a later run continues.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Check and time answers under schemas, with and without drafts.

    For one stream, 8 and 32. Exit code 1: an answer does not follow its schema, or differs with drafts, or a criterion was
    missed.
    """
    from benchmarks.schema_drafts import main as run

    if not run(model, answers=answers, learned=learned, keep=keep, as_json=json):
        raise typer.Exit(1)


@app.command("lengths")
def lengths(
    device: Annotated[str, typer.Option(metavar="NAME", help="The cost model: CPU or H200.")] = "CPU",
    real: Annotated[bool, typer.Option("--real", help="Measure the default model, at one load.")] = False,
    seeds: Annotated[int, typer.Option(min=2, metavar="N", help="Runs with other requests.")] = 4,
    requests: Annotated[int, typer.Option(min=20, metavar="N", help="Requests of a run.")] = 400,
    plot: Annotated[Path | None, typer.Option(metavar="PATH", help="Draw a chart as SVG or PNG.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="PATH", help="Write all figures as JSON.")] = None,
) -> None:
    """Compare orders of requests by known, learned and unknown lengths of answers.

    Short and long answers with the same max_tokens; and the waits that refused clients are given. Exit code 1: a bar was
    missed.
    """
    from benchmarks.lengths import main as run

    if not run(device=device, seeds=seeds, requests=requests, real=real, plot=plot, as_json=json):
        raise typer.Exit(1)


app.command("plan-accuracy")(plan_accuracy)
app.command("plan-scale")(plan_scale)


@app.command("drafts")
def drafts(
    model: Annotated[str, typer.Option("--model", "-m", help="The model.")] = "default",
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Rounds over all prompts.")] = 2,
    predictions: Annotated[
        bool, typer.Option("--predictions", help="Compare wrong predictions with none instead.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Time one stream with and without draft tokens.

    For several kinds of prompts. Exit code 1: an answer differs with draft tokens.
    """
    from benchmarks.drafts import main, main_predictions

    if not (main_predictions if predictions else main)(model, rounds, json):
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(app)
