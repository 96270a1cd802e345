"""Every argument of what lineate.layers and lineate.models export is documented, one line each."""

import inspect
import re

import pytest

from lineate import layers, models

EXPORTED = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (layers, models)
    for name in module.__all__
    if inspect.isclass(getattr(module, name)) or inspect.isfunction(getattr(module, name))
}


@pytest.mark.parametrize("name", EXPORTED)
def test_arguments_are_documented(name):
    found = EXPORTED[name]
    if getattr(found, "_is_protocol", False):
        return
    texts = [inspect.getdoc(found) or "", inspect.getdoc(getattr(found, "__init__", None)) or ""]
    text = next((each for each in texts if "Args:\n" in each), "")
    _, _, arguments = text.partition("Args:\n")
    documented = re.findall(r"^    (\w+): \S", arguments, re.MULTILINE)
    assert documented == list(inspect.signature(found).parameters), text


@pytest.mark.parametrize("name", EXPORTED)
def test_sentences_have_a_subject(name):
    assert not (inspect.getdoc(EXPORTED[name]) or "").startswith("Of ")
