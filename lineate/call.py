"""The types that describe one call of a rule: its tensors, the caller's request, and the options it runs with.

The public ops and `torch.library` take flat arguments; everything between them passes these values. torch.compile
traces them, and one-token calls make them for every token, so making one costs less than a microsecond.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import GetAttrKey, KeyEntry, register_pytree_node

from lineate.rule import Rule, compute_dtype

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that q, k, v and the gates may have."""
Role = Literal["operand", "gate", "state", "bounds", "parameter"]


class Field(NamedTuple):
    """One tensor of a call: what code that treats all tensors alike (cutting, casting, saving) needs to know of it."""

    name: str
    """Its name in Inputs, in schemas and in messages."""
    role: Role
    """An operand is q, k or v; a gate has a number for each token; a parameter turns raw gates into gates."""
    shapes: tuple[str, ...]
    """The shapes that it may have, in the letters of rule.py."""

    @property
    def tokens(self) -> bool:
        """Whether dimension 1 is the tokens, so that sequences and chunks are slices of it."""
        return self.role in ("operand", "gate")

    @property
    def differentiable(self) -> bool:
        """Whether a call has a gradient with respect to it."""
        return self.role != "bounds"


def _is(role: Role, *shapes: str) -> dict[str, Any]:
    return {"role": role, "shapes": shapes}


Kind = TypeVar("Kind", bound="Inputs")


def described(kind: type[Kind]) -> type[Kind]:
    """Return Inputs, or a class derived from it, with its fields listed by what they are."""
    kind.FIELDS = tuple(Field(x.name, x.metadata["role"], x.metadata["shapes"]) for x in fields(kind))
    kind.NAMES = tuple(x.name for x in kind.FIELDS)
    kind.OPERANDS = tuple(x.name for x in kind.FIELDS if x.role == "operand")
    kind.GATES = tuple(x.name for x in kind.FIELDS if x.role == "gate")
    kind.OF_TOKENS = tuple(x.name for x in kind.FIELDS if x.tokens)
    kind.DIFFERENTIABLE = tuple(x.name for x in kind.FIELDS if x.differentiable)
    register_pytree_node(
        kind, _leaves, partial(_from_leaves, kind), flatten_with_keys_fn=_leaves_with_keys,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
    )  # fmt: skip
    return kind


def _leaves(call: "Inputs") -> tuple[list[Tensor], list[str]]:
    """Return the tensors that are there, and their names, for torch.utils._pytree."""
    given = call.given()
    return [*given.values()], [*given]


def _leaves_with_keys(call: "Inputs") -> tuple[list[tuple[KeyEntry, Any]], list[str]]:
    tensors, names = _leaves(call)
    return [(GetAttrKey(name), x) for name, x in zip(names, tensors, strict=True)], names


def _from_leaves(kind: type[Kind], tensors: Iterable[Any], names: Iterable[str]) -> Kind:
    return kind.of({**dict.fromkeys(kind.NAMES), **dict(zip(names, tensors, strict=True))})


@described
@dataclass(frozen=True, kw_only=True, eq=False, init=False)
class Inputs:
    """The tensors of a call, by name. An absent gate is None; an absent state is an empty memory.

    A call with other tensors is a copy, `inputs.replace(state=state)`; code that treats tensors alike names no field
    but asks for those that it means (`OF_TOKENS`, `GATES`, ...), so that a new field needs no change there.
    """

    FIELDS: ClassVar[tuple[Field, ...]]
    NAMES: ClassVar[tuple[str, ...]]
    """The names of all fields, in their order."""
    OPERANDS: ClassVar[tuple[str, ...]]
    """Those of q, k and v."""
    GATES: ClassVar[tuple[str, ...]]
    """Those of the gates, by which a rule is selected."""
    OF_TOKENS: ClassVar[tuple[str, ...]]
    """Those whose dimension 1 is the tokens."""
    DIFFERENTIABLE: ClassVar[tuple[str, ...]]
    """Those that may have a gradient."""

    q: Tensor = field(metadata=_is("operand", "b t h k"))
    """`b t h k`."""
    k: Tensor = field(metadata=_is("operand", "b t h k", "b t n h k"))
    """`b t h k`; `b t n h k` for a rule with n writes a token."""
    v: Tensor = field(metadata=_is("operand", "b t hv v", "b t n hv v"))
    """`b t hv v`; `b t n hv v` for a rule with n writes a token."""
    log_decay: Tensor | None = field(default=None, metadata=_is("gate", "b t hv", "b t hv k"))
    """`b t hv`, `b t hv k`, or None; the raw gate if Options.raw_decay. (Ops also take `hv`: see spread_decay.)"""
    beta: Tensor | None = field(default=None, metadata=_is("gate", "b t hv", "b t hv v", "b t n hv"))
    """`b t hv`, `b t hv v`, or None; `b t n hv` for n writes a token; the raw logit if Options.raw_beta."""
    erase: Tensor | None = field(default=None, metadata=_is("gate", "b t hv k"))
    """`b t hv k`, or None: what the key is multiplied by where it is compared, in gated_delta_rule_2."""
    write: Tensor | None = field(default=None, metadata=_is("gate", "b t hv v"))
    """`b t hv v`, or None: what the value is multiplied by, in gated_delta_rule_2."""
    probe: Tensor | None = field(default=None, metadata=_is("gate", "b t hv k"))
    """`b t hv k`, or None: the key that is compared, in diagonal_plus_low_rank."""
    direction: Tensor | None = field(default=None, metadata=_is("gate", "b t hv k"))
    """`b t hv k`, or None: the key that is erased, in diagonal_plus_low_rank."""
    state: Tensor | None = field(default=None, metadata=_is("state", "b hv k v", "n_seqs hv k v"))
    """`b hv k v`; `n_seqs hv k v` for packed sequences."""
    cu_seqlens: Tensor | None = field(default=None, metadata=_is("bounds", "n_seqs + 1"))
    """`n_seqs + 1`: where the sequences packed into one row begin and end."""
    A_log: Tensor | None = field(default=None, metadata=_is("parameter", "hv"))
    """`hv`, for raw gates: log_decay = rule.decay_of_gate(gate, A_log, dt_bias), beta = beta_scale sigmoid(logit)."""
    dt_bias: Tensor | None = field(default=None, metadata=_is("parameter", "hv", "hv k"))
    """`hv`, or `hv k`; only for raw gates."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        log_decay: Tensor | None = None,
        beta: Tensor | None = None,
        erase: Tensor | None = None,
        write: Tensor | None = None,
        probe: Tensor | None = None,
        direction: Tensor | None = None,
        state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
    ) -> None:
        tensors = {
            "q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta, "erase": erase, "write": write,
            "probe": probe, "direction": direction, "state": state, "cu_seqlens": cu_seqlens, "A_log": A_log,
            "dt_bias": dt_bias,
        }  # fmt: skip
        _fill(self, tensors)

    if not TYPE_CHECKING:  # a typo is still an error of types

        def __getattr__(self, name: str) -> Any:
            """Raise: only a pickle of 0.1.0, where calls were tuples, loads without its tensors."""
            if name in type(self).NAMES:
                raise AttributeError(
                    f"{name} must be in a call, got none: a pickle of lineate 0.1.0 loads without its tensors; make "
                    "the call again with Inputs(q, k, v, ...), or load the file with 0.1.0 and keep inputs._asdict()"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def of(cls, tensors: dict[str, Tensor | None]) -> Self:
        """Return the call with these tensors, which are all fields in their order; the dictionary is kept."""
        call = object.__new__(cls)
        _fill(call, tensors)
        return call

    def replace(self, **changed: Tensor | None) -> Self:
        """Return a copy in which the named tensors are others."""
        for name in changed:
            if name not in self.NAMES:
                raise TypeError(f"{name!r} must be a field of {type(self).__name__}, one of {', '.join(self.NAMES)}")
        return self.of({**self.named(), **changed})

    def map(self, run: Callable[[Tensor], Tensor], names: Iterable[str] | None = None) -> Self:
        """Return a copy in which each tensor x of these fields (None: of all) is run(x); absent ones stay absent."""
        found = ((name, getattr(self, name)) for name in (self.NAMES if names is None else names))
        return self.replace(**{name: run(x) for name, x in found if x is not None})

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return all tensors in the order of NAMES, for code that keeps them in that order and nothing else."""
        return tuple(self.named().values())

    def named(self) -> dict[str, Tensor | None]:
        """Return all tensors by name, in the order of NAMES; the dictionary must not be changed."""
        if is_dynamo_compiling():  # torch 2.11 does not trace __dict__ of a frozen dataclass
            return {name: getattr(self, name) for name in self.NAMES}
        return self.__dict__  # no other way is as fast

    def given(self) -> dict[str, Tensor]:
        """Return the tensors that are there, by name."""
        return {name: x for name in self.NAMES if (x := getattr(self, name)) is not None}

    def gates(self) -> tuple[str, ...]:
        """Return the names of the gates that are there."""
        return tuple(name for name in self.GATES if getattr(self, name) is not None)

    def refuse_unread(self, reads: Iterable[str], reader: str) -> None:
        """Raise if a tensor is there that the reader does not read: a call without it is another call."""
        for name in self.NAMES:
            if name not in reads and getattr(self, name) is not None:
                raise ValueError(
                    f"{name} must be None for {reader}, which does not read it, got a tensor; leave it None"
                )

    def at(self, tokens: slice, state: Tensor | None = None) -> Self:
        """Return these tokens of every row, to run from this state; they are no longer packed."""
        return self.map(lambda x: x[:, tokens], self.OF_TOKENS).replace(state=state, cu_seqlens=None)


def _fill(call: Inputs, tensors: dict[str, Tensor | None]) -> None:
    """Set all fields of a new call; in a compiled graph as dataclass does, elsewhere at a third of that time."""
    if is_dynamo_compiling():
        for name, x in tensors.items():
            object.__setattr__(call, name, x)
    else:
        _SET(call, "__dict__", tensors)


_SET = object.__setattr__


class Slots(NamedTuple):
    """Where the states of the rows lie in the pool that a decoding call is given, and how they are rounded."""

    slots: Tensor | None = None
    """`rows`, or `rows tokens`: where each state is written; None if row i has state i."""
    start_slots: Tensor | None = None
    """`rows`: where each state is read, if elsewhere."""
    seeds: Tensor | None = None
    """`rows`: token i of a row rounds its bfloat16 state stochastically with seeds[row] + i; None: to the nearest."""


class RingTensors(NamedTuple):
    """The tensors of a ring (lineate.ops.rings): the tokens of each slot since its state was stored.

    A slot's ring has (tokens - folded) mod every entries, and they are the first ones.
    """

    keys: Tensor
    """`slots h every k`."""
    writes: Tensor
    """`slots hv every v`."""
    log_decay: Tensor | None
    """`slots hv every`, float32; `slots hv every k`, the input of the call; None for rules that do not forget."""
    tokens: Tensor
    """`slots`, int64: a counter of the tokens of each slot."""
    folded: Tensor
    """`slots`, int64: what the counter was when the slot's ring was last emptied by a fold of its own."""
    every: int
    """The tokens after which the state is written."""
    A_log: Tensor | None = None
    """`hv`, for entries whose log_decay is a raw gate."""
    dt_bias: Tensor | None = None
    """`hv` or `hv k`, for entries whose log_decay is a raw gate."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that launches read or write, without the parameters of raw gates."""
        return self.keys, self.writes, self.log_decay, self.tokens, self.folded


class Request(NamedTuple):
    """The options that the caller of an op passes, before they are checked."""

    scale: float | None = None
    """Multiplies the output; None is 1/sqrt(k)."""
    form: str = "auto"
    """'auto', 'recurrent', 'chunkwise' or 'parallel'."""
    backend: str = "auto"
    """'auto', 'torch', 'native' or 'triton'."""
    chunk_size: int | None = None
    """Tokens a chunk; None takes the backend's own size."""
    normalize_qk: bool = False
    """Whether q and k are l2-normalised inside."""


class RawGates(NamedTuple):
    """Which gates of a call are raw, and how they become gates."""

    raw_decay: bool = True
    """Whether log_decay is a raw gate."""
    raw_beta: bool = True
    """Whether beta is a raw logit."""
    beta_scale: float = 1.0
    """beta lies in (0, beta_scale)."""
    lower_bound: float | None = None
    """If given, log_decay lies in (lower_bound, 0)."""

    @property
    def which(self) -> bool | str:
        """The same as one value: "log_decay" or "beta" if only that one is raw."""
        return which_are_raw(self.raw_decay, self.raw_beta)


class Options(NamedTuple):
    """How a call runs: everything that is not a tensor."""

    rule: Rule
    """The row of the rule."""
    scale: float
    """Multiplies the output."""
    normalize_qk: bool = False
    """Whether q and k are l2-normalised inside."""
    chunk_size: int = 64
    """Tokens a chunk; the triton kernels take no other size than 64."""
    beta_scale: float = 1.0
    """beta lies in (0, beta_scale) where it is made from a raw logit."""
    raw_decay: bool = False
    """Whether log_decay is a raw gate. There need not be an A_log."""
    raw_beta: bool = False
    """Whether beta is a raw logit."""
    lower_bound: float | None = None
    """If given, log_decay of a raw gate lies in (lower_bound, 0)."""

    @property
    def corrects(self) -> bool:
        """Whether the rule writes the error (delta rules) or the value itself."""
        return self.rule.corrects

    @property
    def raw_gates(self) -> bool | str:
        """Whether the gates are raw; "log_decay" or "beta" if only that one is."""
        return which_are_raw(self.raw_decay, self.raw_beta)


def in_one_dtype(inputs: Inputs) -> Inputs:
    """Return the inputs with q, k and v in the dtype that theirs promote to, and the state in its compute dtype.

    Arguments that are not floating-point tensors are returned unchanged and left to the checks.
    """
    q, k, v, state = inputs.q, inputs.k, inputs.v, inputs.state
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return inputs
    if not q.dtype == k.dtype == v.dtype:
        if not all(x.dtype in FLOATING for x in (q, k, v)):
            return inputs
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        inputs = inputs.map(lambda x: x.to(dtype), inputs.OPERANDS)
    if isinstance(state, Tensor) and state.dtype != compute_dtype(inputs.v.dtype) and state.is_floating_point():
        inputs = inputs.replace(state=state.to(compute_dtype(inputs.v.dtype)))
    return inputs


def spread_decay(inputs: Inputs) -> Inputs:
    """Return the inputs with a constant log_decay of each head, `hv`, as a view `b t hv`; others unchanged."""
    v, log_decay = inputs.v, inputs.log_decay
    if not isinstance(log_decay, Tensor) or log_decay.dim() != 1 or not isinstance(v, Tensor) or v.dim() not in (4, 5):
        return inputs
    if log_decay.shape[0] != v.shape[-2]:
        return inputs
    return inputs.replace(log_decay=log_decay.expand(*v.shape[:2], v.shape[-2]))


def spread_bias(dt_bias: Tensor, gate: Tensor) -> Tensor:
    """Return dt_bias in the shape `hv` or `hv k` of a gate's last dimensions; it may be flat, or one number a head."""
    if gate.dim() == 4 and dt_bias.shape == gate.shape[2:3] and gate.shape[3] > 1:
        return dt_bias[:, None].expand(gate.shape[2:])
    return dt_bias.view(gate.shape[2:])


def which_are_raw(decay: bool, beta: bool) -> bool | str:
    """Return Options.raw_gates from whether each of the gates is raw."""
    if decay == beta:
        return decay
    return "log_decay" if decay else "beta"
