"""The commands `lineate generate` and `lineate chat`."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineate.console.options import add_command, argument, option, parameters, sign
from lineate.console.terminal import fail, print_anything, printable

if TYPE_CHECKING:
    import typer

    from lineate.generation.defaults import SamplingFlags
    from lineate.generation.ranks import RankedJob
    from lineate.models import HybridLM

STDIN = "-"
"""A prompt of this name is read from standard input."""


@dataclass(frozen=True, kw_only=True)
class DrawingArguments:
    """The options that `lineate generate` and `lineate chat` share."""

    tokens: int = option(400, "Most tokens to add.", "--max-tokens", "--tokens", least=1)
    temperature: float | None = option(
        None, "0: always the likeliest token; the checkpoint's, else 0.8, if not given.", least=0
    )
    top_k: int | None = option(None, "Only among the k likeliest; 0: all; the checkpoint's, else 0.", least=0)
    top_p: float | None = option(
        None, "Only among the likeliest that together have this probability; the checkpoint's, else 0.95."
    )
    min_p: float | None = option(None, "Only tokens with at least this part of the likeliest one's probability.")
    repetition_penalty: float | None = option(None, "Above 1: tokens that occurred become less likely.")
    sampling_defaults: str = option(
        "checkpoint", "checkpoint: options not given are those of generation_config.json; none: lineate's own."
    )
    seed: int = option(0, "Seed of the draws.", least=0, most=2**63 - 1)
    stop: list[str] | None = option(  # noqa: RUF009  # it is a field
        None, "End before this text; may be given several times."
    )
    dtype: str = option("auto", "float32, bfloat16, ...; auto: as stored.")
    device: str = option("auto", "cpu, cuda, or auto: a GPU if there is one.")
    bits: str | None = option(None, "Keep large weights in 16, 8 or 4 bits or fp8; none: as stored.")
    raw: bool = option(False, "Write control characters unchanged, not as dots: for a file.", "--raw")

    @property
    def sampling(self) -> "SamplingFlags":
        """The sampling options that were given."""
        from lineate.generation.defaults import NAMES, SamplingFlags

        given = {name: getattr(self, name) for name in NAMES if hasattr(self, name)}
        return SamplingFlags(given, self.seed, self.sampling_defaults)


@dataclass(frozen=True, kw_only=True)
class _Prompted:
    """The model and the prompt of `lineate generate`."""

    folder: str = argument("Folder of a run, or of a model and tokenizer, or a hub name.", "RUN")
    prompt: str | None = option(None, "The beginning of the text; - or none: standard input.", "--prompt", "-p")


@dataclass(frozen=True, kw_only=True)
class GenerateArguments(DrawingArguments, _Prompted):
    """The options of `lineate generate`."""

    tensor: int = option(1, "Processes that share the model; start as many with torchrun.", least=1)


@dataclass(frozen=True, kw_only=True)
class _Instructed:
    """The model and the instructions of `lineate chat`."""

    folder: str | None = argument(
        "Folder of a run, or of a model and tokenizer, or a hub name; none: a small model.", "[RUN]", None
    )
    system: str = option("", "The system message.")


@dataclass(frozen=True, kw_only=True)
class ChatArguments(DrawingArguments, _Instructed):
    """The options of `lineate chat`."""

    tokens: int = option(1024, "Most tokens of an answer.", "--max-tokens", "--tokens", least=1)
    resume: str | None = option(
        None, "Continue the conversation that /save wrote to this file, with its options.", metavar="FILE"
    )


def add_commands(app: "typer.Typer") -> None:
    """Add both commands to the application."""

    def generate(**given: Any) -> None:
        """Continue a prompt with a trained model; the text is printed while it is generated."""
        _generate(GenerateArguments(**given))

    def chat(**given: Any) -> None:
        """Talk with a model in the terminal; a turn reads only new tokens. /help lists the commands."""
        asked = ChatArguments(**given)
        try:
            run_chat(
                asked.folder, asked.sampling, asked.system, asked.tokens, asked.stop or (), asked.dtype, asked.device,
                asked.raw, asked.bits, asked.resume,
            )  # fmt: skip
        except (ValueError, OSError, ImportError, RuntimeError) as error:
            fail(error, 1 if isinstance(error, RuntimeError) else 2)

    sign(generate, parameters(GenerateArguments))
    sign(chat, parameters(ChatArguments))
    add_command(
        app, generate, 'lineate generate out/train -p "def " --max-tokens 100',
        "lineate generate ~/models/Qwen3.5-4B -p Once --temperature 0 --device cuda",
    )  # fmt: skip
    add_command(app, chat, "lineate chat", "lineate chat ~/models/Qwen3.5-4B --bits 8 --system 'Be brief.'")


def _generate(asked: GenerateArguments) -> None:
    """Generate, on this rank if there are several; a wrong option ends the program."""
    from lineate.generation.job import join_job, working
    from lineate.generation.loading import find_device

    try:
        device, sampling = find_device(asked.device), asked.sampling
        flags = {
            "sampling": repr(sampling), "tokens": asked.tokens, "stop": asked.stop, "dtype": asked.dtype,
            "bits": asked.bits, "device": device,
        }  # fmt: skip
        job = join_job(asked.tensor, device, asked.folder, flags)
        with working(job):
            text = read_prompt(asked.prompt) if job is None or job.is_main else ""
            text = text if job is None else job.link.share(text)
            run_generate(
                asked.folder, text, sampling, asked.tokens, asked.stop or (), asked.dtype, device, asked.raw,
                asked.bits, job,
            )  # fmt: skip
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        fail(error, 1 if isinstance(error, RuntimeError) else 2)


def read_prompt(given: str | None) -> str:
    """Return the prompt: the option, or standard input, without its last newline; "" if that is a terminal.

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
    sampling: "SamplingFlags",
    tokens: int,
    stop: Sequence[str] = (),
    dtype: str = "auto",
    device: str = "auto",
    raw: bool = False,
    bits: int | str | None = None,
    job: "RankedJob | None" = None,
) -> None:
    """Print a prompt and its continuation, and the tokens per second to standard error.

    Args:
        folder: Folder of a run, or of a model with its tokenizer, or a name on the hub.
        prompt: The text to continue.
        sampling: The given sampling options; the others are the checkpoint's defaults, or else OWN.
        tokens: The most tokens to add.
        stop: Strings that end the text; they are not printed.
        dtype: Name of the dtype of the weights; "auto": as stored.
        device: "cpu", "cuda", or "auto".
        raw: Print control characters unchanged, rather than as dots.
        bits: Bits of large weights, 16, 8 or 4, or "fp8"; None: as stored.
        job: The processes that share the model, of which rank 0 prints; None: there is one.
    """
    from lineate.generation import generate
    from lineate.generation.defaults import OWN
    from lineate.generation.loading import find_device, load_model
    from lineate.quantised.which import name_of_bits
    from lineate.text import Detokenizer, StopStrings

    print_anything()
    place, ranks = (find_device(device), None) if job is None else (job.device, job.model_ranks)
    model, tokenizer = load_model(folder, dtype, place, name_of_bits(bits), ranks, sampling.reads)
    chosen = sampling.resolve(model.sampling_defaults, OWN)
    if job is None or job.is_main:
        _say_defaults(model, sampling)
    ids = [*tokenizer.start, *tokenizer.encode(prompt)] or [tokenizer.end]
    words, stops = Detokenizer(tokenizer, after=ids), StopStrings(stop)
    ends = tokenizer.ends | model.end_tokens
    drawn = generate(model, [ids], tokens, sampling=[chosen], stop=ends)
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
    sampling: "SamplingFlags",
    system: str = "",
    tokens: int = 1024,
    stop: Sequence[str] = (),
    dtype: str = "auto",
    device: str = "auto",
    raw: bool = False,
    bits: int | str | None = None,
    resume: str | None = None,
) -> None:
    """Hold a conversation over standard input and output.

    Args:
        folder: Folder of a run, or of a model with its tokenizer, or a name on the hub; None: the built-in model.
        sampling: The given sampling options; the others are the checkpoint's defaults, or else OWN.
        system: The system message.
        tokens: The most tokens of an answer.
        stop: Strings that end an answer.
        dtype: Name of the dtype of the weights; "auto": as stored.
        device: "cpu", "cuda", or "auto".
        raw: Print control characters unchanged, rather than as dots.
        bits: Bits of large weights, 16, 8 or 4, or "fp8"; None: as stored.
        resume: A file of /save, from which to continue.
    """
    from lineate.console.names import user_path
    from lineate.generation.chat import Conversation
    from lineate.generation.defaults import OWN
    from lineate.generation.loading import find_device, load_or_builtin
    from lineate.generation.session import Session
    from lineate.quantised.which import name_of_bits

    print_anything()
    model, tokenizer = load_or_builtin(
        folder, dtype, find_device(device), lambda text: print(printable(text), file=sys.stderr, flush=True),
        name_of_bits(bits), sampling.reads,
    )  # fmt: skip
    if tokenizer.chat is not None:
        tokenizer.chat.check()
    _say_defaults(model, sampling)
    chosen = sampling.resolve(model.sampling_defaults, OWN)
    talk = Conversation(model, tokenizer, chosen, tokens, tuple(stop))
    if resume is not None:
        talk.resume(user_path(resume))
    if system or resume is None:
        talk.system(system)
    Session(talk, raw).run()


def _say_defaults(model: "HybridLM", sampling: "SamplingFlags") -> None:
    """Print the sampling options of the checkpoint, if it has any."""
    if found := sampling.used(model.sampling_defaults):
        text = f"[sampling of the checkpoint: {found}; --sampling-defaults none leaves it out]"
        print(text, file=sys.stderr, flush=True)
