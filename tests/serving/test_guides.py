"""Grammars: every text that a guide allows is what was asked for, and nothing else is allowed."""

import json
import random

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("tokenizers")

from lineate.serving.api.calls import Called
from lineate.serving.api.guides import NOT_FOLLOWED, Grammars, Guide
from lineate.serving.api.schemas import JsonFormat
from lineate.serving.api.tools import AnswerParser, calls_grammar
from lineate.text.tokenizer import Bytes
from lineate.web.errors import ApiError
from tests.support.chat_tokenizer import chat_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": -5, "maximum": 5},
        "kind": {"enum": ["a", "bc"]},
        "more": {"$ref": "#/$defs/pair"},
    },
    "required": ["n", "kind", "more"],
    "additionalProperties": False,
    "$defs": {"pair": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}},
}
LARGE = {"anyOf": [{"type": "object", "properties": {f"{i}_{j}": {} for j in range(20)}} for i in range(100)]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {
                    "x": {"type": "integer", "minimum": 0, "maximum": 99},
                    "note": {"type": "string", "maxLength": 5},
                    "sign": {"enum": ["plus", "minus"]},
                },
                "required": ["x", "note"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "additionalProperties": False}}},
]


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, 10_000)


def walk(guide: Guide, tokenizer, seed: int, most: int = 3000, vocab: int = 300) -> list[int]:
    """Follow a guide with random tokens until it ends."""
    draw, ids = random.Random(seed), []
    while not guide.finished and len(ids) < most:
        allowed = guide.allowed(vocab)
        assert allowed.shape == (vocab,) and not allowed[tokenizer.vocab_size :].any()
        token = draw.choice(allowed.nonzero()[:, 0].tolist())
        if token in tokenizer.ends:
            return ids
        guide.advance(token)
        ids.append(token)
    assert guide.finished
    return ids


@pytest.mark.parametrize("seed", range(5))
def test_random_tokens_make_json_of_the_schema(grammars, tokenizer, seed):
    guide = grammars.guide(grammars.json(JsonFormat(SCHEMA)), "schema")
    value = json.loads(tokenizer.decode(walk(guide, tokenizer, seed)))
    assert set(value) == {"n", "kind", "more"} and -5 <= value["n"] <= 5
    assert value["kind"] in ("a", "bc") and len(value["more"]) == 2


def test_a_tokenizer_of_bytes(grammars):
    tokenizer = Bytes()
    own = Grammars(tokenizer, 10_000)
    guide = own.guide(own.json(JsonFormat(SCHEMA)), "schema")
    assert set(json.loads(tokenizer.decode(walk(guide, tokenizer, 1)))) == {"n", "kind", "more"}


def test_the_end_is_allowed_only_at_the_end(grammars, tokenizer):
    guide = grammars.guide(grammars.json(JsonFormat({"type": "boolean"})), "schema")
    (end,) = tokenizer.ends
    for token in tokenizer.encode("true"):
        assert not guide.finished and not guide.allowed(tokenizer.vocab_size)[end]
        guide.advance(token)
    assert guide.finished or guide.allowed(tokenizer.vocab_size)[end]


def test_copies_and_rollback(grammars, tokenizer):
    guide = grammars.guide(grammars.json(JsonFormat({"enum": ["abc", "abd"]})), "schema")
    for token in tokenizer.encode('"ab'):
        guide.advance(token)
    other, before = guide.copy(), guide.allowed(300)
    for token in tokenizer.encode('c"'):
        guide.advance(token)
    assert (other.allowed(300) == before).all() and not other.finished
    guide.rollback(2)
    assert (guide.allowed(300) == before).all() and not guide.finished
    for token in tokenizer.encode('d"'):
        guide.advance(token)
    assert guide.finished


def test_a_token_that_is_not_allowed_is_an_error(grammars, tokenizer):
    guide = grammars.guide(grammars.json(JsonFormat()), "schema")
    with pytest.raises(ValueError, match="cannot be followed"):
        guide.advance(tokenizer.encode("x")[0])


def test_a_kept_grammar_begins_anew(grammars, tokenizer):
    grammar = grammars.json(JsonFormat({"enum": ["q"]}))
    first = grammars.guide(grammar, "schema")
    for token in tokenizer.encode('"q"'):
        first.advance(token)
    again = grammars.guide(grammar, "schema")
    assert not again.finished and again.allowed(300).nonzero()[:, 0].tolist() == tokenizer.encode('"')


@pytest.mark.parametrize(
    "schema", [{"type": "nonsense"}, {"$ref": "#/x"}, {"$ref": "#"}, {"type": "string", "pattern": "((("}]
)
def test_schemas_that_cannot_be_followed(tokenizer, schema):
    grammars = Grammars(tokenizer, 10**6)
    with pytest.raises(ApiError, match="my_field must be a JSON schema that can be followed") as caught:
        grammars.guide(grammars.json(JsonFormat(schema)), "my_field")
    assert caught.value.status == 400 and caught.value.param == "my_field"


def test_a_grammar_that_becomes_too_large(tokenizer):
    grammars = Grammars(tokenizer, 10**6)
    guide = grammars.guide(grammars.json(JsonFormat(LARGE)), "schema")
    with pytest.raises(ValueError, match=NOT_FOLLOWED):
        for token in tokenizer.encode('{"'):
            guide.advance(token)
            guide.allowed(300)


def test_a_schema_that_is_too_long(grammars):
    with pytest.raises(ApiError, match="at most 10000 bytes"):
        grammars.guide(grammars.json(JsonFormat({"description": "x" * 20_000})), "schema")


def test_a_schema_does_not_set_options_of_the_grammar(grammars):
    plain = JsonFormat({"type": "object"})
    for options in ({"whitespace_pattern": ".*"}, {"item_separator": "never"}, 5):
        assert grammars.json(JsonFormat({"type": "object", "x-guidance": options})) == grammars.json(plain)


@pytest.mark.parametrize("form", ["json", "tags", "kimi"])
@pytest.mark.parametrize("enum", [5, {}, [], "word"])
def test_tools_with_an_enum_that_is_none(grammars, tokenizer, form, enum):
    parameters = {"type": "object", "properties": {"x": {"enum": enum}}, "required": ["x"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(ApiError, match="tools must be"):
        grammars.guide(calls_grammar(form, tools, False, tokenizer.encode_rendered), "tools")


def test_reasoning_comes_before_the_answer(grammars, tokenizer):
    grammar = grammars.after_reasoning(grammars.json(JsonFormat({"enum": ["q"]})))
    guide = grammars.guide(grammar, "schema")
    for token in (
        tokenizer.encode('Hm, {"a": 1}?\n') + tokenizer.encode_rendered("</think>") + tokenizer.encode('\n\n"q"')
    ):
        assert guide.allowed(300)[token]
        guide.advance(token)
    assert guide.finished


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("form", ["json", "tags", "kimi"])
@pytest.mark.parametrize("seed", range(3))
def test_random_tokens_make_calls(grammars, tokenizer, form, parallel, seed):
    grammar = calls_grammar(form, TOOLS, parallel, tokenizer.encode_rendered)
    ids = walk(grammars.guide(grammar, "tools"), tokenizer, seed)
    text = tokenizer.decode(ids, keep_special=True)
    parser = AnswerParser(TOOLS)
    calls = parser.push(text) + parser.finish()
    assert calls and all(isinstance(call, Called) for call in calls), text
    assert parallel or len(calls) == 1
    for call in calls:
        arguments = json.loads(call.arguments)
        if call.name == "add":
            assert {"x", "note"} <= set(arguments) <= {"x", "note", "sign"}
            assert 0 <= arguments["x"] <= 99 and isinstance(arguments["note"], str) and len(arguments["note"]) <= 5
        else:
            assert (call.name, arguments) == ("stop", {})


def test_markers_that_are_tokens_are_written_as_tokens(grammars, tokenizer):
    for form, marker in (("json", "<tool_call>"), ("kimi", "<|tool_calls_section_begin|>")):
        guide = grammars.guide(calls_grammar(form, TOOLS, False, tokenizer.encode_rendered), "tools")
        assert guide.allowed(300).nonzero()[:, 0].tolist() == tokenizer.encode_rendered(marker)
