"""A call as a value: pickles, also those of 0.1.0, copies, and torch's pytrees."""

import copy
import pickle

import pytest
import torch
from torch.utils import _pytree as pytree

import lineate
from lineate.call import Inputs


def drawn() -> Inputs:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 1, 3)
    return Inputs(q, k, v, log_decay=-torch.rand(1, 2, 1), state=torch.zeros(1, 1, 3, 3))


def same(one: Inputs, other: Inputs) -> bool:
    """Whether two calls have the same tensors."""
    pairs = zip(one.tensors(), other.tensors(), strict=True)
    return all(x is y is None or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs)


@pytest.mark.parametrize("copied", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy, copy.copy])
def test_copies(copied):
    assert same(copied(drawn()), drawn())


class Tuple:
    """Stands in for Inputs of 0.1.0, a tuple of nine tensors, when it is pickled."""

    def __init__(self, *tensors: torch.Tensor | None) -> None:
        self.tensors = tensors

    def __reduce__(self):
        return Inputs.__new__, (Inputs, *self.tensors)  # what the opcode NEWOBJ of such a pickle calls


def test_a_pickle_of_0_1_0_raises_when_it_is_read():
    old = pickle.loads(pickle.dumps(Tuple(*drawn().tensors())))
    for read in (lambda: old.q, lambda: old.given(), lambda: old.replace(v=old.v), lambda: repr(old)):
        with pytest.raises(AttributeError, match=r"(q|v) must be in a call, got none: a pickle of lineate 0\.1\.0"):
            read()
    with pytest.raises(AttributeError, match="'Inputs' object has no attribute 'gate'"):
        drawn().gate  # noqa: B018
    assert not hasattr(drawn(), "gate")


def test_it_is_a_pytree():
    inputs = drawn()
    doubled = pytree.tree_map(lambda x: 2 * x, {"call": inputs})["call"]
    assert isinstance(doubled, Inputs) and doubled.beta is None and torch.equal(doubled.q, 2 * inputs.q)
    leaves, spec = pytree.tree_flatten(inputs)
    assert [x is y for x, y in zip(leaves, inputs.given().values(), strict=True)] == [True] * 5
    assert same(pytree.tree_unflatten(leaves, spec), inputs)
    assert spec == pytree.treespec_loads(pytree.treespec_dumps(spec))
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(inputs)[0]]
    assert paths == [".q", ".k", ".v", ".log_decay", ".state"]


def test_transforms_take_it():
    """torch.func finds the tensors of a call; one without beta stays without."""

    def loss(inputs: Inputs) -> torch.Tensor:
        given = {name: x for name, x in inputs.given().items() if name != "state"}
        return lineate.gated_linear_attention(**given).output.square().sum()

    inputs = drawn()
    found = torch.func.grad(loss)(inputs)
    wanted = inputs.map(lambda x: x.clone().requires_grad_())
    loss(wanted).backward()
    assert found.beta is None and torch.allclose(found.q, wanted.q.grad) and torch.allclose(found.k, wanted.k.grad)
