"""The model of a picture, the text it reads, and the inputs of its layers' rules on that text."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate.call import Inputs
from lineate.checks import check_inputs, check_one_rate
from lineate.console.names import nearest, user_path
from lineate.dispatch import select_rule
from lineate.explore.pictures import PictureOptions
from lineate.layers import Carried, MixerKind, kind_of, kinds
from lineate.models import HybridLM
from lineate.models.config import HybridConfig
from lineate.models.presets import PRESETS, preset
from lineate.rule import ONE_KEY_RULES, Rule, rule_named
from lineate.system.seeding import own_random_numbers
from lineate.text import PublishedTokenizer, Tokenizer
from lineate.torch_ops.tracing import cpu_by_default

SMALL_PRESETS = ("tiny", "small", "compact", "base")
"""Presets that are drawn with random weights; larger ones take minutes and show no more."""

TEXT = '''def mean(values):
    """The mean of some numbers."""
    total = 0.0
    for value in values:
        total = total + value
    return total / len(values)


def spread(values):
    """The standard deviation of some numbers."""
    center = mean(values)
    total = 0.0
    for value in values:
        total = total + (value - center) ** 2
    return (total / len(values)) ** 0.5
'''
"""The default text of a model."""


@dataclass(frozen=True)
class Subject:
    """A model, created at its first use, and its encoding of text."""

    config: HybridConfig
    make: Callable[[], HybridLM]
    name: str
    """Its name for titles, which says if the weights are random."""
    trained: bool
    encode: Callable[[str], list[int]] | None
    """None if the folder has no tokenizer."""
    decode: Callable[[int], str] | None

    @cached_property
    def model(self) -> HybridLM:
        return self.make()

    @property
    def pictured(self) -> list[int]:
        """The layers that can be pictured."""
        return _pictured(self.config)

    def read(self, options: PictureOptions, tokens: int, most: int | None = None) -> tuple[Tensor, list[str]]:
        """Return the first ids `1 t` of the text, and each as a word.

        There are `tokens` of them, or options.tokens, which may be up to `most`. Without a text, TEXT is read, or
        random tokens if there is no tokenizer.
        """
        tokens = tokens if options.tokens is None else options.tokens
        if most is not None and tokens > most:
            raise ValueError(f"--tokens must be at most {most} for this picture, got {tokens}; more cannot be seen")
        if self.encode is None or self.decode is None:
            if options.text is not None:
                raise ValueError(f"--text needs a tokenizer, and {self.name} has none; leave it out for random tokens")
            generator = torch.Generator().manual_seed(options.seed)
            ids = torch.randint(0, self.config.vocab_size, (1, tokens), generator=generator)
            return ids, [f"{number} " for number in ids[0].tolist()]
        found = self.encode(TEXT if options.text is None else options.text)[:tokens]
        if not found:
            raise ValueError("--text must have at least one token, got none")
        most = self.config.vocab_size
        if max(found) >= most:
            raise ValueError(f"--text has token {max(found)}, and {self.name} only {most}; its tokenizer is another's")
        return torch.tensor([found]), [self.decode(number) for number in found]


@dataclass(frozen=True)
class Trace:
    """The inputs of one layer's rule on a text; the layer's output is `run_rule` of it. n is the writes of a token."""

    layer: int
    letter: str
    rule: str
    """The name of the mixer's row."""
    q: Tensor
    """`t h k`, as the rule uses it: of length 1, or features."""
    k: Tensor
    """`t h k`; `t n h k` for a mixer with several writes a token."""
    v: Tensor
    """`t hv v`, or `t n hv v`."""
    log_decay: Tensor | None
    """`t hv` or `t hv k`."""
    beta: Tensor | None
    """`t hv`, or `t n hv`."""
    row: Rule
    """The row of the rule that it is given to."""
    erase: Tensor | None = None
    """`t hv k`, as in lineate.call.Inputs."""
    write: Tensor | None = None
    """`t hv v`."""
    probe: Tensor | None = None
    """`t hv k`."""
    direction: Tensor | None = None
    """`t hv k`."""

    @property
    def op(self) -> str:
        """The public op that computes the rule."""
        return self.row.name

    @property
    def name(self) -> str:
        """The name under which its own rule is pictured: that of a rule of one key, or of the mixer."""
        return self.op if self.row in ONE_KEY_RULES else self.rule

    @property
    def writes(self) -> int:
        """n."""
        return self.k.shape[1] if self.k.dim() == 4 else 1

    @property
    def keys(self) -> Tensor:
        """The keys of all writes, one after another, `m h k` with m = n t."""
        return self.k.flatten(0, 1) if self.k.dim() == 4 else self.k

    @property
    def values(self) -> Tensor:
        """The values of all writes, `m hv v`."""
        return self.v.flatten(0, 1) if self.v.dim() == 4 else self.v

    @property
    def one_by_one(self) -> bool:
        """Whether its rule has one write a token, so that it takes several writes of the mixer as tokens."""
        return self.writes > 1 and not self.row.writes

    @property
    def inputs(self) -> Inputs:
        """The call of the op. Where `one_by_one`, a token forgets before its first write and is read after its last."""
        gates = {name: getattr(self, name) for name in Inputs.GATES}
        q, k, v, n = self.q, self.k, self.v, self.writes
        if self.one_by_one:
            q, k, v = q.repeat_interleave(n, 0), self.keys, self.values
            gates["beta"] = None if self.beta is None else self.beta.flatten(0, 1)
            if self.log_decay is not None:
                gates["log_decay"] = self.log_decay.new_zeros(len(k), *self.log_decay.shape[1:])
                gates["log_decay"][::n] = self.log_decay
        return Inputs(q=q, k=k, v=v, **gates).map(lambda x: x[None])

    def head(self, index: int) -> "Trace":
        """Return one value head and the key head that serves it; all tensors are `t 1 ...` or `t n 1 ...`."""
        of_key = index // (self.v.shape[-2] // self.k.shape[-2])
        gates = {name: getattr(self, name) for name in Inputs.GATES}
        cut: dict[str, Any] = {
            name: x if x is None else x.narrow(2 if name == "beta" and x.dim() == 3 else 1, index, 1)
            for name, x in gates.items()
        }
        q, k, v = self.q.narrow(1, of_key, 1), self.k.narrow(-2, of_key, 1), self.v.narrow(-2, index, 1)
        return replace(self, q=q, k=k, v=v, **cut)

    def under(self, name: str) -> "Trace":
        """Return the same tokens for another rule: it drops gates that it lacks; those that the layer lacks stay open.

        Keys have length 1 where the rule corrects. A decay per channel becomes its mean where the rule has one per
        head, and beta is the mean of `write` where the layer has that.
        """
        rule = rule_named(name)
        if rule is self.row and rule.general:
            return self
        if rule not in ONE_KEY_RULES:
            raise ValueError(f"rule must be one of {', '.join(x.name for x in ONE_KEY_RULES)}, got {name!r}")
        decay = self.q.new_zeros(len(self.q), self.v.shape[-2]) if self.log_decay is None else self.log_decay
        if rule.decays == ("head",) and decay.dim() == 3:
            decay = decay.mean(-1)
        if rule.decays == ("channel",) and decay.dim() == 2:
            decay = decay[..., None].expand(*decay.shape, self.k.shape[-1])
        beta = None
        if "beta" in rule.gates:
            written = self.v.new_ones(self.v.shape[:-1]) if self.write is None else self.write.mean(-1)
            beta = written if self.beta is None else self.beta
        k = F.normalize(self.k, dim=-1) if rule.corrects else self.k
        return replace(
            self, k=k, log_decay=decay if "log_decay" in rule.gates else None, beta=beta, row=rule, erase=None,
            write=None, probe=None, direction=None,
        )  # fmt: skip


def pictured_rule(kind: MixerKind) -> str:
    """Return the name under which the rule of a mixer is pictured, as Trace.name does."""
    name = kind.rule or kind.name
    return name if rule_named(name) in ONE_KEY_RULES else kind.name


def wants_model(options: PictureOptions) -> bool:
    """Whether a picture with a hand-made part also shows a model; a quick one only on request."""
    asked = (options.model, options.pattern, options.text, options.layer, options.head, options.tokens)
    return not options.quick or any(x is not None for x in asked)


@cpu_by_default
def open_subject(options: PictureOptions) -> Subject:
    """Return the model of the options: a folder's, a preset with random weights, or the built-in small one."""
    from lineate.text.tokenizer import Bytes

    plain = Bytes()
    if options.model is None:
        if options.pattern is not None:
            raise ValueError("--pattern is for presets; add --model tiny, or leave it out")
        from lineate.generation.builtin import builtin_config, builtin_model

        make = cpu_by_default(lambda: builtin_model(partial(print, file=sys.stderr))[0])
        return Subject(builtin_config(), make, "built-in small model", True, plain.encode, _decoder(plain))
    if options.model in PRESETS and not Path(options.model).exists():
        if options.model not in SMALL_PRESETS:
            raise ValueError(
                f"--model {options.model} has no weights here, and random ones of its size show nothing; give the "
                f"folder of its checkpoint, or one of {', '.join(SMALL_PRESETS)}"
            )
        config = preset(options.model, options.pattern)
        make = partial(_untrained, config, options.seed)
        return Subject(config, make, f"{options.model}, untrained", False, plain.encode, _decoder(plain))
    if options.pattern is not None:
        raise ValueError(f"--pattern is for presets, and --model {options.model} is not one; leave it out")
    return _from_folder(options.model)


def _untrained(config: HybridConfig, seed: int) -> HybridLM:
    with own_random_numbers(seed):
        return HybridLM(config).eval()


def _from_folder(given: str) -> Subject:
    from lineate.generation.loading import find_model
    from lineate.models.families import read_config
    from lineate.models.files.hub import find_folder, is_hub_name
    from lineate.models.opening import open_checkpoint

    folder = find_folder(given) if is_hub_name(given) else user_path(given)
    if not given or not folder.is_dir():  # '' would be the current folder
        raise ValueError(
            f"--model must be a preset ({', '.join(SMALL_PRESETS)}) or the folder or hub name of a checkpoint, got "
            f"{given!r}, which is {'not a folder' if folder.exists() else 'neither'}{nearest(given, SMALL_PRESETS)}"
        )
    place = find_model(folder)
    config = read_config(open_checkpoint(place))
    make = partial(HybridLM.from_pretrained, place, dtype=torch.float32, progress=False, sampling_defaults=False)
    name = given if is_hub_name(given) else folder.resolve().name
    return Subject(config, make, shown(name, 32), True, *_tokenizer(place))


def _tokenizer(folder: Path) -> tuple[Callable[[str], list[int]] | None, Callable[[int], str] | None]:
    """Return the functions of a folder's tokenizer that encode a text and show a token; None if there is none."""
    from lineate.text import has_tokenizer, load_tokenizer

    if not has_tokenizer(folder):
        return None, None
    return reader_of(load_tokenizer(folder))


def reader_of(tokenizer: Tokenizer) -> tuple[Callable[[str], list[int]], Callable[[int], str]]:
    """Return the functions of a tokenizer that encode a text and show a token."""
    encode = tokenizer.encode_rendered if isinstance(tokenizer, PublishedTokenizer) else tokenizer.encode
    return encode, lambda number: tokenizer.shown_bytes(number, True).decode("utf-8", "replace")


def shown(text: str, longest: int = 12) -> str:
    """Return the end of a text as one short line that any font can draw."""
    line = text.replace("\n", "\\n").replace("\t", "\\t")
    line = "".join(letter if letter.isprintable() and ord(letter) < 0x250 else "?" for letter in line)
    return line if len(line) <= longest else "..." + line[3 - longest :]


def _decoder(tokenizer: Any) -> Callable[[int], str]:
    return lambda number: tokenizer.decode([number])


def choose_layer(subject: Subject, options: PictureOptions) -> int:
    """Return options.layer if it can be pictured, else the middle layer of the last available kind of mixer."""
    letters, pictured = subject.config.letters, subject.pictured
    if not pictured:
        known = ", ".join(kind.letter for kind in kinds() if kind.trace is not None)
        raise ValueError(
            f"the picture needs a layer of {known}, and {subject.name} has {''.join(letters)}; "
            "choose another model or pattern"
        )
    if options.layer is not None:
        if options.layer not in pictured:
            named = ", ".join(f"{n} ({letters[n]})" for n in pictured)
            raise ValueError(f"--layer must be one of {named}, got {options.layer}")
        return options.layer
    last = subject.config.mixer_kinds()
    preferred = [kind.letter for kind in last if kind.trace is not None][-1]
    found = [n for n in pictured if letters[n] == preferred]
    return found[len(found) // 2]


def choose_head(subject: Subject, layer: int, options: PictureOptions) -> int:
    """Return options.head, or 0."""
    part = subject.config.part(kind_of(subject.config.letters[layer]))
    heads = getattr(part, "value_heads", None) or getattr(part, "heads", None)  # a user's own part may have neither
    if options.head is not None and heads is not None and options.head >= heads:
        raise ValueError(f"--head must lie in 0 .. {heads - 1} in layer {layer}, got {options.head}")
    return options.head or 0


@dataclass(frozen=True)
class Given:
    """The arguments of a call of a mixer.

    Args:
        x: `1 t hidden`.
        carried: what the layers of the call hand on, for a mixer that reads or writes it.
    """

    x: Tensor
    carried: Carried | None = None


@torch.no_grad()
@cpu_by_default
def trace(model: HybridLM, ids: Tensor, layers: Sequence[int] | None = None) -> list[Trace]:
    """Return the rule inputs of each layer that can be pictured (or each of those named) on ids `1 t`."""
    wanted = [n for n in _pictured(model.config) if layers is None or n in layers]
    with caught(model, wanted) as inputs:
        model(ids, last_only=True)
    return [trace_layer(model, n, inputs[n]) for n in wanted]


def _pictured(config: HybridConfig) -> list[int]:
    """Return the layers whose mixer's row has a trace."""
    return [n for n, letter in enumerate(config.letters) if kind_of(letter).trace is not None]


@contextmanager
def caught(model: HybridLM, layers: Sequence[int]) -> Iterator[dict[int, Given]]:
    """Record what these layers' mixers are called with while the model runs inside."""
    found: dict[int, Given] = {}

    def catch(n: int, mixer: nn.Module, given: tuple[Any, ...]) -> None:
        found[n] = Given(given[0], *given[3:])

    mixers: dict[int, Any] = {n: model.layers[n].mixer for n in layers}
    hooks = [mixer.register_forward_pre_hook(partial(catch, n)) for n, mixer in mixers.items()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def trace_layer(model: HybridLM, layer: int, given: Given) -> Trace:
    """Return the inputs of the rule of one layer whose mixer is called in this way."""
    kind = kind_of(model.config.letters[layer])
    assert kind.trace is not None
    x, handed_on = given.x, () if kind.first is None else (given.carried,)
    found = kind.trace(model.layers[layer].mixer, x, *handed_on)
    where = f"trace of {kind.label} ({kind.letter})"
    if not isinstance(found, Inputs) or found.k.dim() not in (4, 5) or found.k.shape[:2] != x.shape[:2]:
        got = f"k of shape {tuple(found.k.shape)}" if isinstance(found, Inputs) else type(found).__name__
        raise ValueError(
            f"{where} must return Inputs with the keys of each token, k of shape (1, t, h, k) or (1, t, n, h, k) with "
            f"t = {x.shape[1]}, got {got}; give n writes a token a dimension of their own"
        )
    if found.A_log is not None:
        raise ValueError(f"{where} must return log_decay and beta themselves, got raw gates with A_log; apply them")
    row = rule_named(kind.rule or kind.name) or select_rule(found)
    try:
        found.refuse_unread(("q", "k", "v", *Inputs.GATES), "a picture")
        check_inputs(row, found)
        if not row.writes:
            check_one_rate(found.beta)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} must return what {row.name} can be called with: {error}") from None
    gates = {name: None if (gate := getattr(found, name)) is None else gate[0] for name in Inputs.GATES}
    return Trace(layer, kind.letter, kind.name, found.q[0], found.k[0], found.v[0], row=row, **gates)


def run_rule(trace: Trace, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the output `t hv v` and the memory `hv k v` of the trace's rule, from its tensors."""
    import lineate

    inputs = trace.inputs.replace(state=None if state is None else state[None])
    output, memory = getattr(lineate, trace.op)(**inputs.given())
    return output[0, trace.writes - 1 :: trace.writes] if trace.one_by_one else output[0], memory[0]
