"""The command `lineate quantize`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lineate.console.names import named_path, user_path
from lineate.console.options import add_command, argument, option, parameters, sign
from lineate.console.terminal import console, fail, printable

if TYPE_CHECKING:
    import typer

    from lineate.models.quantizing import Quantized

SHOWN = 12
"""How many names of weights that stayed are printed, the largest first."""


@dataclass(frozen=True)
class QuantizeArguments:
    """The options of `lineate quantize`."""

    model: str = argument("Folder of a checkpoint or run, or a name on the hub.", "MODEL")
    out: str = argument("The new folder; it must not exist, or be empty.", "OUT")
    bits: str = option("8", "Bits of a weight: 16, 8 or 4, or fp8.")


def add_commands(app: "typer.Typer") -> None:
    """Add `lineate quantize` to the command line."""

    def quantize(**given: Any) -> None:
        """Write a checkpoint with weights of 8, 4 or 16 bits, or of fp8; one tensor at a time is in memory."""
        run_quantize(QuantizeArguments(**given))

    sign(quantize, parameters(QuantizeArguments))
    add_command(
        app,
        quantize,
        "lineate quantize ~/models/Qwen3.5-4B qwen-int8",
        "lineate quantize Qwen/Qwen3.5-4B qwen-int4 --bits 4",
    )


def run_quantize(asked: QuantizeArguments) -> None:
    """Write the new checkpoint and print what became of its bytes; a wrong option ends the program.

    Args:
        asked: The options.
    """
    from lineate.generation.loading import model_folder
    from lineate.models.files.hub import is_hub_name
    from lineate.models.quantizing import quantize_checkpoint
    from lineate.quantised.which import name_of_bits

    try:
        form = name_of_bits(asked.bits)
        assert form is not None
        name = asked.model if is_hub_name(asked.model) else model_folder(user_path(named_path(asked.model)))
        made = quantize_checkpoint(name, user_path(named_path(asked.out)), form)
    except (ValueError, OSError, ImportError) as error:
        fail(error, 2)
    for line in _lines(made):
        console().print(line)


def _lines(made: "Quantized") -> list[str]:
    """Return what was written, in words."""
    after, before = made.bytes_after, made.bytes_before
    lines = [
        f"{printable(str(made.folder))}: {made.form.name}, {_bytes(after)} of {_bytes(before)} ({after / before:.0%})"
    ]
    stayed = sorted(made.stayed.items(), key=lambda item: -item[1])
    total = sum(made.stayed.values())
    lines.append(f"not quantised: {_bytes(total)}, {total / after:.2%} of the new files")
    lines += [f"  {name}  {_bytes(nbytes)}" for name, nbytes in stayed[:SHOWN]]
    if len(stayed) > SHOWN:
        lines.append(f"  and {len(stayed) - SHOWN} more names, {_bytes(sum(n for _, n in stayed[SHOWN:]))}")
    return lines


def _bytes(n: int) -> str:
    return f"{n:,} bytes" if n < 10**6 else f"{n / 1e6:,.1f} MB"
