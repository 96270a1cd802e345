"""Helpers that the tests of lineate.integrations.transformers share."""

import warnings
from functools import cache

import pytest

try:
    import transformers

    from tests.support import transformers_models
except ImportError:  # the tests that need it are skipped
    transformers_models = None
else:
    warnings.filterwarnings("ignore", module="transformers")
    transformers.logging.set_verbosity_error()


@cache
def _built(family):
    return transformers_models.build(family)


NAMES, KINDS = ((), ()) if transformers_models is None else (transformers_models.NAMES, transformers_models.KINDS)


def _model(request):
    built = _built(request.param).eval()
    built.zero_grad()
    return built


@pytest.fixture(params=NAMES)
def model(request):
    """Return a tiny model of each family; tests may leave gradients in it, but do not change it."""
    return _model(request)


@pytest.fixture(params=[pytest.param(x, marks=() if x in KINDS else pytest.mark.slow) for x in NAMES])
def kind(request):
    """Return the same; the fast suite has one family for each kind of layer."""
    return _model(request)


@pytest.fixture
def disabled():
    from lineate.integrations.transformers import disable

    disable()
    yield
    disable()
