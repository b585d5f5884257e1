"""The `weft` command line: what each command takes and says. The work is imported inside the command that needs it."""

from pathlib import Path
from typing import Annotated

import typer

from weft import __version__
from weft.cli.bench import AsJson, bench_app
from weft.cli.entry import run

app = typer.Typer(
    name="weft",
    help="Run large language models on this machine: continuous batching, a paged KV cache, models as GGUF or "
    "safetensors.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: the boxes break paragraphs where the source does
)
app.add_typer(bench_app, name="bench")

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="'default' (SmolLM2-135M-Instruct), 'hf:owner/name' (see `weft pull --help`), or a path to a GGUF file "
        "or a folder with safetensors. Fetched on first use.",
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", "-n", metavar="N", help="Most new tokens to generate; at least 1."),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        "-t",
        metavar="T",
        help="Randomness of the choice of tokens; 0 always takes the best. Default: what the model's makers "
        "suggest, else 0.",
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(metavar="P", help="Choose among the likeliest tokens that together have this probability."),
]
Seed = Annotated[
    int | None,
    typer.Option(metavar="N", help="Seed of the sampling noise: the same seed gives the same text."),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="End the text before this; may be given several times."),
]
Context = Annotated[
    int | None,
    typer.Option(metavar="N", help="Longest context in tokens, prompt and answer; default: the model's own."),
]

Device = Annotated[
    str,
    typer.Option(metavar="auto|cpu|cuda", help="What computes; auto: a card, where there is one."),
]
Threads = Annotated[
    int | None, typer.Option(metavar="N", help="Threads that compute; default: one for each core.")
]
Quantize = Annotated[
    str | None, typer.Option(metavar="int8|int4", help="Quantise weights that are stored as floats.")
]
KvCache = Annotated[
    str | None,
    typer.Option(metavar="full|two-tier", help="two-tier: older tokens quantised; default: full."),
]
TailLength = Annotated[
    int | None, typer.Option(metavar="N", help="Two-tier: newest tokens kept as is; default: 256.")
]
StoreBits = Annotated[
    int | None, typer.Option(metavar="8|4", help="Two-tier: bits of older values; default: 8.")
]


def _print_version(wanted: bool) -> None:
    if wanted:
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

    MODEL is 'default' (also where none is named), 'hf:owner/name' of the Hugging Face hub (with ':Q4_K_M' or
    '/file.gguf' for GGUF files, and '@revision'), or a path, which is only checked. Every byte that was fetched is
    compared with its checksum; whether weft can run the model is looked at too. Then its path is printed.

    A pull that was stopped goes on where it was. The cache is the user cache directory; WEFT_HOME names another.
    HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE count for the hub.
    """
    from weft.cli.pull import pull_command

    pull_command(model)


@app.command()
def models(json: AsJson = False) -> None:
    """List the models in the cache.

    By the names to ask for them with, with those that are not whole.
    """
    from weft.cli.pull import models_command

    models_command(json)


@app.command()
def remove(model: Annotated[str, typer.Argument(metavar="MODEL", hidden=True)]) -> None:
    """Delete a model from the cache, with its packed weights.

    MODEL is a name that `weft models` shows. It waits for a pull that is under way.
    """
    from weft.cli.pull import remove_command

    remove_command(model)


@app.command()
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", hidden=True)] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option(
            "--file", "-f", metavar="PATH", help="A file that is one prompt; may be given several times."
        ),
    ] = None,
    input: Annotated[
        Path | None,
        typer.Option("--input", "-i", metavar="PATH", help="JSON lines to answer, '-' for standard input."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="Where the answers go as JSON lines, '-' for standard output.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the output where it exists.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Keep the answers in the output, and add what is missing."),
    ] = False,
    model: Model = "default",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
    answers: Annotated[
        int | None, typer.Option(metavar="N", help="How many for each prompt; default: 1.")
    ] = None,
    json_schema: Annotated[
        Path | None,
        typer.Option("--json-schema", metavar="PATH", help="A JSON schema that every answer obeys."),
    ] = None,
    regex: Annotated[
        str | None,
        typer.Option("--regex", metavar="PATTERN", help="A regular expression that every answer matches."),
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
            "--chat", help="Take each plain prompt as a message, and answer it in the model's chat format."
        ),
    ] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message, with --chat.")] = None,
) -> None:
    """Continue prompts, or answer JSON lines.

    PROMPT is a text to continue, '-' one from standard input, which is also read where a pipe leads there and nothing
    else is given; --file names more. Of standard input and files the last line end is no part of the prompt. Several
    prompts run as one batch. One answer to one prompt is printed as it is made; programs that ask for several should
    read JSON lines: '-o -'.

    A prompt gets 64 new tokens, one with --chat as many as the context has room for, unless --max-tokens says otherwise.

    A line of --input is a string, an object with "prompt" or "messages" and, beside them, "id" and sampling parameters, or
    a request of the OpenAI batch format (its "model" is not looked at: --model answers). What a line does not say is
    taken from the options; after them requests of the OpenAI format have the defaults of that API (16 new tokens of a
    completion, temperature 1 where the model's makers suggest none).

    Each line is answered by one line, in the order in which they end, found again by "id", "custom_id" or "index"; a bad
    line gets an error and the others go on. Exit code 1: some failed.
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
def chat(
    model: Model = "default",
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System message that opens the conversation.")
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
) -> None:
    """Talk to a model. Ctrl-D or /exit ends the conversation; /help lists the other commands.

    An answer ends by itself, after --max-tokens, when the context is full, or with Ctrl-C; what was said until then is
    remembered.
    """
    from weft.cli.chat import chat_command

    chat_command(
        model=model,
        system=system,
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


@app.command()
def serve(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", hidden=True)] = None,
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Default: 127.0.0.1; 0.0.0.0 lets others in.")
    ] = None,
    port: Annotated[int | None, typer.Option(metavar="N", help="Default: 8000; 0: any.")] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="What requests call it; default: the file's name.")
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Ask for this key; may be repeated.")
    ] = None,
    api_key_file: Annotated[
        str | None, typer.Option(metavar="PATH", help="Keys, one in a line; or TOML.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(metavar="N", help="Longest context; default: the model's.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="KV cache, such as 4GiB; default: 2GiB or more."),
    ] = None,
    kv_cache: KvCache = None,
    tail_length: TailLength = None,
    store_bits: StoreBits = None,
    drafts: Annotated[
        int | None,
        typer.Option(metavar="N", help="Tokens guessed at a time; 0: none; default: 11."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="auto|cpu|cuda", help="Default: a card, where there is one.")
    ] = None,
    threads: Threads = None,
    quantize: Quantize = None,
    chat_template: Annotated[
        str | None, typer.Option(metavar="PATH", help="A Jinja file instead of the model's own.")
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="More settings, as TOML.")] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all settings and who set them.")
    ] = False,
) -> None:
    """Serve the OpenAI API over HTTP.

    MODEL is 'default' (SmolLM2-135M-Instruct), 'hf:owner/name', or a path to a GGUF file or a folder with safetensors.
    To try it in a browser open /docs.

    Flags count before variables (WEFT_SERVE_..., WEFT_API_KEY), then the file.

    SIGTERM and Ctrl-C let what is under way end; once more quits at once.
    """
    from weft.cli.serve_command import serve_command

    flags = {
        "model": model,
        "host": host,
        "port": port,
        "names": (name,) if name else None,
        "api_keys": tuple(api_key) if api_key else None,
        "api_key_file": api_key_file,
        "context": context,
        "memory": memory,
        "engine.cache.kv_cache": kv_cache,
        "engine.cache.tail_length": tail_length,
        "engine.cache.store_bits": store_bits,
        "engine.scheduler.max_draft_tokens": drafts,
        "backend": device,
        "threads": threads,
        "quantize": quantize,
        "chat_template": chat_template,
    }
    serve_command(flags, config, print_config)


@app.command()
def doctor(
    model: Annotated[str, typer.Argument(metavar="MODEL", hidden=True)] = "default",
    port: Annotated[int, typer.Option(min=1, max=65535, metavar="N", help="Look whether it is free.")] = 8000,
    json: AsJson = False,
) -> None:
    """Check this machine and a model.

    Says what to expect of it: processor, memory, GPU, packages, the cache, and how fast MODEL may be. Nothing is
    fetched. Exit code 1: something keeps weft from working.
    """
    from weft.cli.doctor import doctor_command

    if not doctor_command(model, port, json):
        raise typer.Exit(1)


@app.command()
def replay(
    path: Annotated[
        Path,
        typer.Argument(metavar="LOG", hidden=True, exists=True, dir_okay=False),
    ],
) -> None:
    """Check a recorded log.

    LOG is what an engine wrote (log_path in its config). It is run through the real scheduler again, and every plan has
    to be the same.
    """
    from weft.cli.replay import replay_command

    replay_command(path)


@app.command("simulate-check")
def simulate_check(
    scenarios: Annotated[int, typer.Option(min=1, metavar="N", help="How many scenarios to run.")] = 1000,
    seed: Annotated[
        int, typer.Option(min=0, metavar="N", help="Seed of the first scenario; each next one adds 1.")
    ] = 0,
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=1, metavar="N", help="Processes to spread the scenarios over.")
    ] = 1,
) -> None:
    """Check the engine in seeded simulations.

    They have random load, faults and tiny pools, on a virtual clock.

    A failure prints its seed; `weft simulate-check --scenarios 1 --seed N` repeats exactly that scenario.
    """
    from weft.cli.simulate import simulate_check_command

    simulate_check_command(scenarios=scenarios, seed=seed, jobs=jobs)


def main() -> None:
    """Run the command line."""
    run(app)


if __name__ == "__main__":
    main()
