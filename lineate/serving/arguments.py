"""The options of `lineate serve`, and their checks before a model is loaded."""

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lineate.console.names import user_path
from lineate.console.options import argument, option
from lineate.console.terminal import printable
from lineate.web.listening import allowed_hosts

if TYPE_CHECKING:
    from lineate.generation.defaults import SamplingFlags
    from lineate.serving.app import Settings
    from lineate.web.limits import Limits

KEYS = "LINEATE_API_KEY"
BUILT_IN = "lineate-small"
"""The default name of the served model."""
LOOKUP, HEAD, NONE = "lookup", "head", "none"


@dataclass(frozen=True)
class ServeArguments:
    """The options of `lineate serve`."""

    folder: str | None = argument(
        "Folder of a run, or of a model and tokenizer, or a hub name; none: a small model.", "[MODEL]", None
    )
    host: str = option("127.0.0.1", "Address to listen at; 0.0.0.0: every address of this machine.")
    port: int = option(8000, "Port to listen at; 0: a free one.", least=0, most=65535)
    name: str | None = option(None, "Name of the model in requests; the folder's or hub's by default.")
    api_key: str | None = option(None, f"Keys of which requests need one, with commas between; or set {KEYS}.")
    device: str = option("auto", "cpu, cuda, or auto: a GPU if there is one.")
    dtype: str = option("auto", "float32, bfloat16, ...; auto: as stored.")
    bits: str | None = option(None, "Keep large weights in 16, 8 or 4 bits or fp8; none: as stored.")
    random_weights: bool = option(
        False, "Serve the shape of a preset, named as MODEL, with random weights, to measure its speed.",
        "--random-weights",
    )  # fmt: skip
    slots: int = option(8, "Sequences that are generated at once.", least=1, most=4096)
    context: int = option(8192, "Most tokens of a prompt and its continuation.", least=2, most=2**24)
    memory: str | None = option(None, "Most memory for running sequences, such as 4GB.", metavar="SIZE")
    state_dtype: str = option(
        "float32", "Of running sequences' memories: float32, or bfloat16, which takes half the bytes."
    )
    state_rounding: str = option("nearest", "Of bfloat16 memories after every token: nearest or stochastic.")
    batch_invariant: bool = option(
        False, "Give a row the same logits, to the bit, whatever rows decode with it; slower, without --draft.",
        "--batch-invariant",
    )  # fmt: skip
    queue: int = option(128, "Most requests that wait; more get status 429.", least=1, most=2**20)
    cache: str = option("1GB", "Memory for states of prompts that were read; 0: keep none.", metavar="SIZE")
    cache_folder: str | None = option(
        None, "Folder for kept states when memory is full or the server ends.", metavar="FOLDER"
    )
    spacing: int | None = option(
        None, "Tokens of a piece of a prompt, a multiple of 64; 128 on a CPU, 1024 to 4096 on a GPU.",
        least=64, most=2**20,
    )  # fmt: skip
    exact: bool = option(False, "No effect: kept states always give the bits of reading the whole prompt.", "--exact")
    draft: str = option(
        NONE, "Guess tokens ahead: lookup (from the text), head (of the model), a smaller model's folder, or none."
    )
    guesses: int = option(4, "Most tokens that are guessed ahead.", least=1, most=32)
    max_tokens: int | None = option(
        None, "Most tokens that a request may generate.", "--max-tokens", "--tokens", least=1
    )
    temperature: float | None = option(None, "Of requests that do not say; the checkpoint's, else 1.", least=0)
    top_k: int | None = option(None, "The same for top_k; the checkpoint's, else 0: all tokens.", least=0)
    top_p: float | None = option(None, "The same for top_p; the checkpoint's, else 1.")
    min_p: float | None = option(None, "The same for min_p; the checkpoint's, else 0.")
    repetition_penalty: float | None = option(None, "The same for repetition_penalty; the checkpoint's, else 1.")
    sampling_defaults: str = option(
        "checkpoint", "checkpoint: requests that do not say draw as generation_config.json says; none: as OpenAI's."
    )
    max_prompt: int | None = option(None, "Most tokens of a prompt.", least=1)
    max_body: str = option("8MB", "Most bytes of a request.", metavar="SIZE")
    timeout: float = option(600.0, "Seconds after which a request is ended.", least=0.001)
    drain: float = option(30.0, "Seconds that running requests have to end after SIGTERM.", least=0.001)
    cors: str | None = option(None, "Origins whose pages may call the server, with commas between.")
    allow_host: str | None = option(None, "More names by which the server may be called, with commas between.")
    access_log: bool = option(False, "Log every request.", "--access-log")
    tensor: int = option(1, "Processes that share the model; start as many with torchrun.", least=1, most=4096)
    replicas: int | None = option(
        None, "Serve this many copies of the model under Ray Serve; none: one, in this process.", least=1, most=4096
    )
    max_replicas: int | None = option(
        None, "Let the replicas grow in number up to this as requests wait, and shrink again.", least=1, most=4096
    )
    target_queue: float | None = option(
        None, "Requests of a replica, running or waiting, that growing aims at; --slots by default.", least=0.01
    )
    imbalance: int | None = option(
        None, "Requests that a replica may have more than the least busy one for the sake of its cache; 4 by default.",
        least=0,
    )  # fmt: skip
    cluster: str | None = option(None, "Address of the Ray cluster to join, or auto; none: start a Ray of its own.")
    replica_cpus: float | None = option(None, "Processors that a replica takes in Ray; 1 by default.", least=0.001)
    replica_gpus: float | None = option(
        None, "GPUs that a replica takes in Ray; 1 with --device cuda by default, else none.", least=0.001
    )


def settings_of(asked: ServeArguments) -> "Settings":
    """Return the access settings and the limits of requests.

    Args:
        asked: The options.
    """
    from lineate.layers.formats import StateFormat
    from lineate.serving.app import Settings

    sampling_of(asked)  # a wrong one is detected before a model is loaded
    StateFormat.of(asked.state_dtype, asked.state_rounding)
    hosts = allowed_hosts(asked.host, words_of(asked.allow_host))
    return Settings(read_keys(asked.api_key), words_of(asked.cors), hosts, limits_of(asked))


def check_invariant_options(asked: ServeArguments) -> None:
    """Raise if --batch-invariant is combined with an option that it does not cover.

    Args:
        asked: The options.
    """
    if not asked.batch_invariant:
        return
    if asked.draft != NONE:
        raise ValueError(f"--batch-invariant does not cover guessed tokens, got --draft {asked.draft}; leave one out")
    if asked.tensor > 1:
        raise ValueError(f"--batch-invariant needs a model on one device, got --tensor {asked.tensor}; leave one out")


def sampling_of(asked: ServeArguments) -> "SamplingFlags":
    """Return the sampling options that were given for requests that do not name them.

    Args:
        asked: The options.
    """
    from lineate.generation.defaults import SamplingFlags

    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return SamplingFlags({name: getattr(asked, name) for name in names}, source=asked.sampling_defaults)


def limits_of(asked: ServeArguments) -> "Limits":
    """Return the limits of requests.

    Args:
        asked: The options.
    """
    from lineate.planning.units import read_bytes
    from lineate.web.limits import Limits

    return Limits(
        body_bytes=read_bytes(asked.max_body, "--max-body"),
        prompt_tokens=asked.max_prompt,
        new_tokens=asked.max_tokens,
        seconds=asked.timeout,
        drain_seconds=asked.drain,
    )


def sizes_of(asked: ServeArguments) -> tuple[int, int | None]:
    """Return the bytes of the cache and of running sequences.

    Args:
        asked: The options.
    """
    from lineate.planning.units import read_bytes

    budget = 0 if asked.cache.strip() == "0" else read_bytes(asked.cache, "--cache")
    if asked.cache_folder is not None and not budget:
        raise ValueError("--cache-folder needs --cache above 0")
    return budget, None if asked.memory is None else read_bytes(asked.memory, "--memory")


def read_keys(given: str | None) -> tuple[str, ...]:
    """Return the keys of the option, or else of the environment; an empty key is refused.

    Args:
        given: The option, with commas between keys.
    """
    keys = words_of(os.environ.get(KEYS) if given is None else given)
    if not all(key.isascii() and key.isprintable() and key and " " not in key for key in keys):
        raise ValueError(f"--api-key and {KEYS} must be visible ASCII characters without spaces")
    return keys


def words_of(given: str | None) -> tuple[str, ...]:
    """Return the items between commas.

    Args:
        given: The option.
    """
    return () if given is None else tuple(word.strip() for word in given.split(","))


def name_of(asked: ServeArguments) -> str:
    """Return the name of the model: never a path of this machine.

    Args:
        asked: The options.
    """
    if asked.name:
        return asked.name
    if asked.folder is None:
        return BUILT_IN
    if asked.random_weights:
        return f"{asked.folder}-random"
    from lineate.models.files.hub import is_hub_name

    return asked.folder if is_hub_name(asked.folder) else user_path(asked.folder).resolve().name


def say(text: str) -> None:
    """Print a line on the server's terminal.

    Args:
        text: The line.
    """
    print(f"lineate: {printable(text)}", file=sys.stderr, flush=True)
