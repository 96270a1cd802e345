"""The commands `lineate generate` and `lineate chat`."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lineate.terminal import fail, print_anything, printable

if TYPE_CHECKING:
    import typer

    from lineate.generation.choice import Sampling
    from lineate.generation.ranks import RankedJob

STDIN = "-"
"""A prompt of this name is read from standard input."""


def add_commands(app: "typer.Typer") -> None:
    """Add both commands to the application; typer is imported here because it is optional."""
    import typer

    Dtype = Annotated[str, typer.Option(help="float32, bfloat16, ...; auto: as stored.")]
    Device = Annotated[str, typer.Option(help="cpu or cuda.")]
    Bits = Annotated[str | None, typer.Option(help="Keep large weights in 16, 8 or 4 bits or fp8; none: as stored.")]
    Seed = Annotated[int, typer.Option(help="Seed of the draws.", min=0, max=2**63 - 1)]
    Temperature = Annotated[float, typer.Option(help="0: always the likeliest token.", min=0)]
    TopK = Annotated[int, typer.Option(help="Only among the k likeliest; 0: all.", min=0)]
    TopP = Annotated[float, typer.Option(help="Only among the likeliest with so much probability.")]
    MinP = Annotated[float, typer.Option(help="Only tokens with so much of the likeliest one's probability.")]
    Penalty = Annotated[float, typer.Option(help="Above 1: tokens that occurred become less likely.")]
    Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")]
    Raw = Annotated[bool, typer.Option("--raw", help="Write control characters as they are, not as dots: for a file.")]

    @app.command()
    def generate(
        folder: Annotated[
            str, typer.Argument(metavar="RUN", help="Folder of a run, or of a model and tokenizer, or a hub name.")
        ],
        prompt: Annotated[
            str | None, typer.Option("--prompt", "-p", help="What the text starts with; - or none: standard input.")
        ] = None,
        tokens: Annotated[int, typer.Option(help="Most tokens to add.", min=1)] = 400,
        temperature: Temperature = 0.8,
        top_k: TopK = 0,
        top_p: TopP = 0.95,
        min_p: MinP = 0.0,
        repetition_penalty: Penalty = 1.0,
        seed: Seed = 0,
        stop: Stop = None,
        dtype: Dtype = "auto",
        device: Device = "cpu",
        bits: Bits = None,
        raw: Raw = False,
        tensor: Annotated[
            int, typer.Option(help="Processes that share the model; start as many with torchrun.", min=1)
        ] = 1,
    ) -> None:
        """Continue a prompt with a trained model; the text appears as it is made."""
        from lineate.generation.choice import Sampling
        from lineate.generation.job import join_job, working

        try:
            sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed=seed)
            flags = {"sampling": repr(sampling), "tokens": tokens, "stop": stop, "dtype": dtype, "bits": bits}
            job = join_job(tensor, device, folder, flags | {"device": device})
            with working(job):
                text = read_prompt(prompt) if job is None or job.is_main else ""
                text = text if job is None else job.link.share(text)
                run_generate(folder, text, sampling, tokens, stop or (), dtype, device, raw, bits, job)
        except (ValueError, OSError, ImportError, RuntimeError) as error:
            fail(error, 1 if isinstance(error, RuntimeError) else 2)

    @app.command()
    def chat(
        folder: Annotated[
            str | None,
            typer.Argument(
                metavar="[RUN]",
                help="Folder of a run, or of a model and tokenizer, or a hub name; none: a small model.",
            ),
        ] = None,
        system: Annotated[str, typer.Option(help="What the model is told before the conversation.")] = "",
        tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)] = 1024,
        temperature: Temperature = 0.8,
        top_k: TopK = 0,
        top_p: TopP = 0.95,
        min_p: MinP = 0.0,
        repetition_penalty: Penalty = 1.0,
        seed: Seed = 0,
        stop: Stop = None,
        dtype: Dtype = "auto",
        device: Device = "cpu",
        bits: Bits = None,
        raw: Raw = False,
        resume: Annotated[
            str | None, typer.Option(help="Go on with what /save wrote into this file; its options replace those here.")
        ] = None,
    ) -> None:
        """Talk with a model in the terminal; a turn reads only what is new. /help lists what can be typed."""
        from lineate.generation.choice import Sampling

        try:
            sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed=seed)
            run_chat(folder, sampling, system, tokens, stop or (), dtype, device, raw, bits, resume)
        except (ValueError, OSError, ImportError, RuntimeError) as error:
            fail(error, 1 if isinstance(error, RuntimeError) else 2)


def read_prompt(given: str | None) -> str:
    """Return the prompt: what was given, or standard input, without its last newline; "" if that is a terminal.

    Args:
        given: The option --prompt.
    """
    if given not in (None, STDIN):
        return str(given)
    if given is None and sys.stdin.isatty():
        return ""
    return sys.stdin.read().removesuffix("\n")


def run_generate(
    folder: str | Path,
    prompt: str,
    sampling: "Sampling",
    tokens: int,
    stop: Sequence[str] = (),
    dtype: str = "auto",
    device: str = "cpu",
    raw: bool = False,
    bits: int | str | None = None,
    job: "RankedJob | None" = None,
) -> None:
    """Print a prompt and its continuation, and how fast it was made to standard error.

    Args:
        folder: Folder of a run, or of a model with its tokenizer, or a name on the hub.
        prompt: The text to continue.
        sampling: How tokens are chosen.
        tokens: The most tokens to add.
        stop: Strings that end the text; they are not printed.
        dtype: Name of the dtype of the weights; "auto": as stored.
        device: "cpu" or "cuda".
        raw: Print control characters as they are, rather than as dots.
        bits: Bits of large weights, 16, 8 or 4, or "fp8"; None: as stored.
        job: The processes that share the model, of which rank 0 prints; None: there is one.
    """
    from lineate.generation import generate
    from lineate.generation.loading import check_device, load_model
    from lineate.small.which import name_of_bits
    from lineate.text import Detokenizer, StopStrings

    print_anything()
    check_device(device)
    place, ranks = (device, None) if job is None else (job.device, job.model_ranks)
    model, tokenizer = load_model(folder, dtype, place, name_of_bits(bits), ranks)
    ids = [*tokenizer.start, *tokenizer.encode(prompt)] or [tokenizer.end]
    words, stops = Detokenizer(tokenizer, after=ids), StopStrings(stop)
    ends = tokenizer.ends | model.end_tokens
    drawn = generate(model, [ids], tokens, sampling=[sampling], stop=ends)
    started = time.perf_counter()

    def write(text: str) -> None:
        if job is not None and not job.is_main:
            return
        sys.stdout.write(text if raw else printable(text))
        sys.stdout.flush()

    write(prompt)
    made, first, met = 0, started, None
    for number in map(int, drawn):
        made += 1
        first = time.perf_counter() if made == 1 else first
        if number < tokenizer.vocab_size and number not in ends:  # the model may have rows without a token
            safe, met = stops.push(words.push(number))
            write(safe)
        if met is not None:
            break
    else:
        safe, met = stops.push(words.finish())
        write(safe + ("" if met is not None else stops.finish()))
    ended = time.perf_counter()
    write("\n")
    rate = f", {(made - 1) / (ended - first):.1f} tokens/s" if made > 1 and ended > first else ""
    if job is None or job.is_main:
        print(f"[{len(ids)} tokens read in {first - started:.2f} s; {made} made{rate}]", file=sys.stderr)


def run_chat(
    folder: str | Path | None,
    sampling: "Sampling",
    system: str = "",
    tokens: int = 1024,
    stop: Sequence[str] = (),
    dtype: str = "auto",
    device: str = "cpu",
    raw: bool = False,
    bits: int | str | None = None,
    resume: str | None = None,
) -> None:
    """Hold a conversation over standard input and output.

    Args:
        folder: Folder of a run, or of a model with its tokenizer, or a name on the hub; None: the built-in model.
        sampling: How tokens are chosen.
        system: What the model is told before the conversation.
        tokens: The most tokens of an answer.
        stop: Strings that end an answer.
        dtype: Name of the dtype of the weights; "auto": as stored.
        device: "cpu" or "cuda".
        raw: Print control characters as they are, rather than as dots.
        bits: Bits of large weights, 16, 8 or 4, or "fp8"; None: as stored.
        resume: A file that /save wrote, with which to go on.
    """
    from lineate.generation.chat import Conversation
    from lineate.generation.loading import check_device, load_or_builtin
    from lineate.generation.session import Session
    from lineate.names import user_path
    from lineate.small.which import name_of_bits

    print_anything()
    check_device(device)
    model, tokenizer = load_or_builtin(
        folder, dtype, device, lambda text: print(printable(text), file=sys.stderr, flush=True), name_of_bits(bits)
    )
    if tokenizer.chat is not None:
        tokenizer.chat.check()
    talk = Conversation(model, tokenizer, sampling, tokens, tuple(stop))
    if resume is not None:
        talk.resume(user_path(resume))
    if system or resume is None:
        talk.system(system)
    Session(talk, raw).run()
