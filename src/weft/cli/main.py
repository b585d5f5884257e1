"""Declares the commands of `weft` with their options and help. Each command imports its implementation when it runs."""

from collections.abc import Callable
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from weft import __version__
from weft.cli.batch import DEFAULT_URL, Key, batch_app
from weft.cli.bench import AsJson, bench_app
from weft.cli.entry import run
from weft.cli.feedback import feedback_app
from weft.cli.learned import learned_app
from weft.cli.memory import memory_app
from weft.cli.plan import plan, profile
from weft.server.settings import FLAGS, flag_type

app = typer.Typer(
    name="weft",
    help="Run large language models on this machine. Models are GGUF files or folders with safetensors.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich would keep the line breaks of the source in the help text
)
app.add_typer(bench_app, name="bench")
app.add_typer(batch_app, name="batch")
app.add_typer(memory_app, name="memory")
app.add_typer(feedback_app, name="feedback")
app.add_typer(learned_app, name="learned")

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="'default' (SmolLM2-135M-Instruct), 'hf:owner/name' (see `weft pull --help`), or the path of a GGUF file "
        "or of a folder with safetensors. Fetched on first use.",
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", "-n", metavar="N", help="Maximum number of new tokens; at least 1."),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        "-t",
        metavar="T",
        help="Randomness of the sampling; 0: greedy. Default: what the model's authors recommend, else 0.",
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(metavar="P", help="Sample from the most likely tokens that together have this probability."),
]
Seed = Annotated[
    int | None,
    typer.Option(metavar="N", help="Seed of the sampling: the same seed gives the same text."),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Stop before this text; may be repeated."),
]


def option(key: str) -> Any:
    """The option of a setting, as its field declares it."""
    flag = FLAGS[key]
    return typer.Option(flag.name, metavar=flag.metavar, help=flag.help, show_default=False)


Context = Annotated[int | None, option("context")]
Device = Annotated[str, option("backend")]
Threads = Annotated[int | None, option("threads")]
Quantize = Annotated[str | None, option("quantize")]
KvCache = Annotated[str | None, option("engine.cache.kv_cache")]
TailLength = Annotated[int | None, option("engine.cache.tail_length")]
StoreBits = Annotated[int | None, option("engine.cache.store_bits")]


def _print_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"weft {__version__}")
        raise typer.Exit


@app.callback()
def weft(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    pass


@app.command()
def pull(model: Annotated[str, typer.Argument(metavar="MODEL", hidden=True)] = "default") -> None:
    """Fetch a model and check it.

    MODEL is 'default' (if omitted), 'hf:owner/name' from the Hugging Face hub, or a path, which is only checked. For
    GGUF files of the hub, add ':Q4_K_M' or '/file.gguf'; '@revision' selects a revision. The command verifies the
    checksums, checks that weft can run the model, and prints its path.

    An interrupted pull continues where it stopped. Models are stored in the user cache directory, or in WEFT_HOME.
    The hub also uses HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE.
    """
    from weft.cli.pull import pull_command

    pull_command(model)


@app.command()
def models(json: AsJson = False) -> None:
    """List the models in the cache.

    Shows the names that other commands accept, and the models that are incomplete.
    """
    from weft.cli.pull import models_command

    models_command(json)


@app.command()
def remove(model: Annotated[str, typer.Argument(metavar="MODEL", hidden=True)]) -> None:
    """Delete a model from the cache, with its packed weights.

    MODEL is a name that `weft models` shows. If the model is being pulled, the command waits.
    """
    from weft.cli.pull import remove_command

    remove_command(model)


@app.command()
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", hidden=True)] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", metavar="PATH", help="A file with one prompt; may be repeated."),
    ] = None,
    input: Annotated[
        Path | None,
        typer.Option("--input", "-i", metavar="PATH", help="A file of JSON lines; '-': standard input."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="Write answers as JSON lines to this file; '-': standard output.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output file.")] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Keep the answers in the output file and add the missing ones."),
    ] = False,
    model: Model = "default",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
    answers: Annotated[int | None, typer.Option(metavar="N", help="Answers per prompt; default: 1.")] = None,
    json_schema: Annotated[
        Path | None,
        typer.Option("--json-schema", metavar="PATH", help="A JSON schema that every answer must match."),
    ] = None,
    regex: Annotated[
        str | None,
        typer.Option("--regex", metavar="PATTERN", help="A regular expression that every answer must match."),
    ] = None,
    context: Context = None,
    device: Device = "auto",
    threads: Threads = None,
    quantize: Quantize = None,
    kv_cache: KvCache = None,
    tail_length: TailLength = None,
    store_bits: StoreBits = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Send each plain prompt as a user message, with the model's chat template."
        ),
    ] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message, with --chat.")] = None,
) -> None:
    """Complete prompts, or answer JSON lines.

    PROMPT is a text to complete; '-' reads one from standard input. Standard input is also read if it is a pipe and no
    prompt is given. --file adds prompts. The last newline of standard input and of files is removed. Several prompts
    run as one batch. A single answer is streamed; for several answers, programs should read JSON lines ('-o -').

    A prompt gets at most 64 new tokens by default; with --chat, as many as fit into the context.

    A line of --input is a string, an object with "prompt" or "messages" and optionally "id" and sampling parameters, or
    a request in the OpenAI batch format (its "model" is ignored). Options are the defaults for missing parameters.
    Requests in the OpenAI format then have the defaults of that API (16 new tokens for a completion; temperature 1,
    unless the model's authors recommend another).

    Each line gets one output line, in the order in which they end, with its "id", "custom_id" or "index". An invalid
    line gets an error and does not stop the others. Exit code 1: some lines failed.
    """
    from weft.cli.generate import generate_command

    generate_command(
        prompts or [],
        files=file or [],
        input_path=input,
        output_path=output,
        overwrite=overwrite,
        resume=resume,
        model=model,
        context=context,
        device=device,
        threads=threads,
        quantize=quantize,
        cache={"kv_cache": kv_cache, "tail_length": tail_length, "store_bits": store_bits},
        chat=chat,
        system=system,
        json_schema=json_schema,
        regex=regex,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=stop,
        n=answers,
    )


@app.command()
def embed(
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT", hidden=True)] = None,
    input: Annotated[
        Path | None,
        typer.Option("--input", "-i", metavar="PATH", help="A file of JSON lines; '-': standard input."),
    ] = None,
    lines: Annotated[
        Path | None,
        typer.Option(
            "--lines", metavar="PATH", help="A file with one text in each line; '-': standard input."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PATH", help="Write the vectors to this file."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output file.")] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Write numbers with spaces between them instead of JSON lines.")
    ] = False,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="'default' (all-MiniLM-L6-v2), 'hf:owner/name', or the path of an embedding model.",
        ),
    ] = "default",
    kind: Annotated[
        str | None,
        typer.Option(
            metavar="KIND", help="query or document: the prompt of the model to put before each text."
        ),
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option(metavar="N", help="Keep this many numbers of each vector.")
    ] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut long texts instead of an error.")] = False,
    threads: Threads = None,
    quantize: Quantize = None,
) -> None:
    """Make vectors of texts.

    TEXT is one text; several may be given. Without TEXT, --lines and --input, standard input has one text in each line.

    A line of --input is a string, or an object with "text" and optionally "id". Each text gets one output line, in the
    order of the input: {"index": 0, "embedding": [...]}, or with the "id". A line that fails gets an error and does not
    stop the others. Exit code 1: some failed.
    """
    from weft.cli.embed import embed_command

    embed_command(
        texts or [],
        input_path=input,
        lines_path=lines,
        output_path=output,
        overwrite=overwrite,
        plain=plain,
        model=model,
        kind=kind,  # type: ignore[arg-type]
        dimensions=dimensions,
        truncate=truncate,
        threads=threads,
        quantize=quantize,
    )


@app.command()
def chat(
    model: Model = "default",
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System message of the conversation.")
    ] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
    context: Context = None,
    device: Device = "auto",
    threads: Threads = None,
    quantize: Quantize = None,
    kv_cache: KvCache = None,
    tail_length: TailLength = None,
    store_bits: StoreBits = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Answer from this vector store of a server; `weft memory add` makes one."
        ),
    ] = None,
    url: Annotated[str, typer.Option(metavar="URL", help="The server of --memory.")] = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Talk to a model. Ctrl-D or /exit ends the conversation; /help lists the other commands.

    Ctrl-C stops an answer. The model remembers the part that was shown.
    """
    from weft.cli.chat import chat_command

    chat_command(
        model=model,
        system=system,
        memory=memory,
        url=url,
        api_key=api_key,
        context=context,
        device=device,
        threads=threads,
        quantize=quantize,
        cache={"kv_cache": kv_cache, "tail_length": tail_length, "store_bits": store_bits},
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=stop,
    )


def with_setting_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the flags of all settings to a command. The command gets each value by the key of its setting."""

    def called(**values: Any) -> None:
        command(**{keys.get(name, name): value for name, value in values.items()})

    keys, parameters = {}, []
    for key, flag in FLAGS.items():
        name = flag.name.strip("-").replace("-", "_").lower()
        kind: Any = list[str] if flag.repeats else flag_type(key)
        shown = (
            option(key) if flag.name.startswith("-") else typer.Argument(metavar=flag.metavar, hidden=True)
        )
        annotation = Annotated[kind | None, shown]
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
        keys[name] = key
    own = [one for one in signature(command).parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
    called.__signature__ = Signature([*parameters, *own])  # type: ignore[attr-defined]
    called.__name__, called.__doc__ = command.__name__, command.__doc__
    return called


@app.command()
@with_setting_flags
def serve(
    *,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="More settings, as TOML.")] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all settings and their sources.")
    ] = False,
    **flags: Any,
) -> None:
    """Serve the APIs of OpenAI, Anthropic and Ollama over HTTP.

    MODEL is 'default', 'hf:owner/name', a GGUF file or a folder with safetensors.

    Flags override variables (WEFT_SERVE_...); these override --config.
    """
    from weft.cli.serve_command import serve_command

    serve_command(flags, config, print_config)


@app.command()
def doctor(
    model: Annotated[str, typer.Argument(metavar="MODEL", hidden=True)] = "default",
    port: Annotated[
        int, typer.Option(min=1, max=65535, metavar="N", help="Check that this port is free.")
    ] = 8000,
    json: AsJson = False,
) -> None:
    """Check this machine and a model.

    Checks processor, memory, GPU, packages and the model cache, and estimates the speed of MODEL. Downloads nothing.
    Exit code 1: a check failed.
    """
    from weft.cli.doctor import doctor_command

    if not doctor_command(model, port, json):
        raise typer.Exit(1)


app.command()(plan)
app.command()(profile)


@app.command()
def replay(
    path: Annotated[
        Path,
        typer.Argument(metavar="LOG", hidden=True, exists=True, dir_okay=False),
    ],
    show: Annotated[
        bool, typer.Option("--show", help="Serve a page that shows the run step by step, until Ctrl-C.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(metavar="N", help="The port of that page; default: 8001; 0: any."),
    ] = None,
) -> None:
    """Replay an event log.

    LOG is the file that an engine wrote (log_path in its config). Its events run through the real scheduler again, and
    every plan has to be the same. Exit code 1: a plan differs; 2: not a log of this version.
    """
    from weft.cli.replay import replay_command, show_command

    if port is not None and not show:
        raise typer.BadParameter("it needs --show", param_hint="'--port'")
    if port is not None and not 0 <= port <= 65535:
        raise typer.BadParameter(f"{port} is not a port; allowed: 0 to 65535", param_hint="'--port'")
    if show:
        show_command(path, 8001 if port is None else port)
    else:
        replay_command(path)


@app.command("simulate-check")
def simulate_check(
    scenarios: Annotated[int, typer.Option(min=1, metavar="N", help="How many scenarios to run.")] = 1000,
    seed: Annotated[
        int, typer.Option(min=0, metavar="N", help="Seed of the first scenario; the next ones add 1 each.")
    ] = 0,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, metavar="N", help="Number of processes.")] = 1,
) -> None:
    """Check the engine in seeded simulations.

    The scenarios have random load, faults and a small KV cache, on a virtual clock.

    A failure prints its seed. `weft simulate-check --scenarios 1 --seed N` repeats that scenario exactly.
    """
    from weft.cli.simulate import simulate_check_command

    simulate_check_command(scenarios=scenarios, seed=seed, jobs=jobs)


def main() -> None:
    """Runs the command line."""
    run(app)


if __name__ == "__main__":
    main()
