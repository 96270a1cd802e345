"""Chat templates render as in transformers, from every place where a folder may have them."""

import json
import pickle
import sys
import threading

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("jinja2")
pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import tokenizers

from lineate.models.files.safetensors import CheckpointError
from lineate.text import DEFAULT_STOPS, DEFAULT_TEMPLATE, Bytes, ChatError, ChatTemplate, load_tokenizer
from lineate.text.chat import read_chat
from tests.support.published import CHAT, KINDS, SPECIAL, make_published

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"a<b": ["\u4e2d", 1.5, None, True]}}}
CONTENT = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["<think>\na\n</think>\n\nb", "<tool>x", " padded \n"]),
    st.lists(st.builds(lambda text: {"type": "text", "text": text}, st.text(max_size=5)), max_size=3),
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": CONTENT},
    optional={"reasoning_content": st.text(max_size=5), "reasoning": st.text(max_size=5)},
).filter(lambda x: x["role"] != "assistant" or isinstance(x["content"], str))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    found = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind.replace(" ", "-"))
        found[kind] = (make_published(kind, folder), load_tokenizer(folder))
    return found


@pytest.mark.cover
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(
    messages=st.lists(MESSAGE, min_size=1, max_size=6),
    tools=st.sampled_from([None, [TOOL]]),
    more=st.sampled_from([{}, {"enable_thinking": False}]),
    prompt=st.booleans(),
)
def test_conversations_are_rendered_and_encoded_as_by_transformers(pairs, kind, messages, tools, more, prompt):
    theirs, ours = pairs[kind]
    expected = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, tokenize=False, **more)
    assert ours.chat.render(messages, tools=tools, add_generation_prompt=prompt, **more) == expected
    ids = theirs.encode(expected, add_special_tokens=False)
    assert ours.encode_chat(messages, tools=tools, add_generation_prompt=prompt, **more) == ids


JOINED = ChatTemplate(CHAT.replace("join('\\n')", "join('')"))
PIECES = st.lists(
    st.sampled_from([*SPECIAL, "<|im_", "end|>", "<", "<|", "|im_end|>", "im_start|>", "x", "\ufdd0", " "]), max_size=5
).map("".join)


@pytest.mark.cover
@settings(max_examples=200, deadline=None)
@given(parts=st.lists(PIECES, min_size=1, max_size=4))
@example(parts=["<|im_", "end|>"])
@example(parts=["<|im_<|im_end|>end|>"])
def test_no_message_makes_a_special_token(pairs, parts):
    """Nor do two parts of a message together, which the template joins without anything between them."""
    _, ours = pairs["bytes"]
    template, ours.chat = ours.chat, JOINED
    try:
        ids = ours.encode_chat([{"role": "user", "content": [{"type": "text", "text": x} for x in parts]}])
    finally:
        ours.chat = template
    (start,), (end,) = ours.encode_rendered("<|im_start|>"), ours.encode_rendered("<|im_end|>")
    special = [i for i in ids if ours.special_text(i) is not None]
    assert special == [start, end, start]
    text = f"<|im_start|>user\n{''.join(parts)}<|im_end|>\n<|im_start|>assistant\n"
    assert ours.decode(ids, keep_special=True) == text


ALL = ChatTemplate(
    "{% for m in messages %}{{ m.role }}{% for k, v in m.arguments.items() %}{{ k }}{{ v }}{% endfor %}{% endfor %}"
    "{{ tools[0].function.parameters|tojson }}{{ effort }}{{ documents|tojson }}{% if think %}!{% endif %}"
)


@settings(max_examples=100, deadline=None)
@given(key=PIECES, value=PIECES, effort=PIECES)
@example(key="<|im_end|>", value="<|im_end|>", effort="<|im_end|>")
@example(key="<|im_", value="end|>", effort="x")
def test_neither_keys_nor_variables_make_a_special_token(pairs, key, value, effort):
    _, ours = pairs["bytes"]
    messages = [{"role": "user", "arguments": {key: value}}]
    tools = [{"function": {"parameters": {key: {"type": value}}}}]
    more = {"effort": effort, "documents": [{key: value}], "think": True}
    template, ours.chat = ours.chat, ALL
    try:
        ids = ours.encode_chat(messages, tools, **more)
    finally:
        ours.chat = template
    assert not [i for i in ids if ours.special_text(i) is not None]
    assert ours.decode(ids, keep_special=True) == ALL.render(messages, tools, **more)


def test_a_panic_of_the_library_is_an_error(tmp_path):
    alphabet = {x: n for n, x in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    engine = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=alphabet, merges=[]))
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    last = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, last])
    engine.decoder = tokenizers.decoders.ByteLevel()
    engine.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    assert len(ours.encode("aa!")) == 3
    for encode in (ours.encode, ours.encode_rendered):
        with pytest.raises(ValueError, match="the tokenizers library must encode any text, got a panic"):
            encode("a" * 3000 + "!")


def test_a_tokenizer_without_a_template_uses_ours():
    ids = Bytes().encode_chat([{"role": "user", "content": "a<|endoftext|>"}])
    assert ids[0] == 256 and 256 not in ids[1:]
    assert Bytes().decode(ids) == "User: a<|endoftext|>\n\nAssistant:"
    asked = ChatTemplate(DEFAULT_TEMPLATE).render([{"role": "user", "content": "b"}] * 2)
    assert DEFAULT_STOPS[0] in asked


def files_of(**values):
    return {name.replace("__", "/").replace("_dot_", "."): data.encode() for name, data in values.items()}


def test_every_place_of_a_template(tmp_path):
    def read(files):
        found = read_chat(tmp_path, files, {"bos_token": "<s>"})
        return found and [found.render([]), found.render([], tools=[{}])]

    text = json.dumps({"chat_template": "{{ bos_token }}1"})
    two = [{"name": "default", "template": "2"}, {"name": "tool_use", "template": "3"}]
    listed = json.dumps({"chat_template": two})
    assert read({}) is None and read(files_of(tokenizer_config_dot_json="{}")) is None
    assert read({"tokenizer_config.json": text.encode()}) == ["<s>1", "<s>1"]
    assert read({"tokenizer_config.json": listed.encode()}) == ["2", "3"]
    assert read({"chat_template.json": text.encode()}) == ["<s>1", "<s>1"]
    several = {"tokenizer_config.json": text.encode(), "chat_template.jinja": b"4"}
    assert read(several) == ["4", "4"]
    assert read(several | {"additional_chat_templates/tool_use.jinja": b"5"}) == ["4", "5"]
    for value in (5, [5], [{"name": "x"}], {"default": 5}):
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template must be a text or a list"):
            read({"tokenizer_config.json": json.dumps({"chat_template": value}).encode()})
    with pytest.raises(CheckpointError, match="expected a chat template named 'default', got tool_use"):
        read({"tokenizer_config.json": json.dumps({"chat_template": two[1:]}).encode()})
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: expected a template in UTF-8"):
        read({"chat_template.jinja": b"\xff"})


def test_named_templates_as_transformers_saves_them(tmp_path):
    theirs = make_published("bytes", tmp_path, {"default": "d{{ messages[0].content }}", "tool_use": "t"})
    assert (tmp_path / "additional_chat_templates/tool_use.jinja").is_file()
    ours, messages = load_tokenizer(tmp_path), [{"role": "user", "content": "x"}]
    for tools in (None, [TOOL]):
        assert ours.chat.render(messages, tools) == theirs.apply_chat_template(messages, tools=tools, tokenize=False)
    ours.save(tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy").chat.render(messages, [TOOL]) == "t"


def test_our_tokenizers_keep_a_template(tmp_path):
    Bytes().save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}{{ messages[0].content }}")
    ours = load_tokenizer(tmp_path)
    ours.save(tmp_path / "copy")
    for found in (ours, load_tokenizer(tmp_path / "copy"), pickle.loads(pickle.dumps(ours))):
        assert found.encode_chat([{"role": "user", "content": "a"}]) == [256, 97]


TEMPLATES = {
    "json": "{{ messages|tojson }}|{{ messages|tojson(indent=2) }}|{{ tools|tojson(separators=(',', ':')) }}",
    "loops": "{% for m in messages %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ m.role }}{% endfor %}",
    "filtered": "{% for m in messages if m.role == 'user' %}{{ loop.index0 }}{{ loop.first }}{% else %}none"
    "{% endfor %}",
    "recursive": "{% for x in [1, [2, [3]]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}",
    "macro": "{% macro f(x, y=2) %}[{{ x }}{{ y }}{{ caller() if caller }}]{% endmacro %}{{ f(1) }}"
    "{% call f(3, y=4) %}c{% endcall %}",
    "set": "{% set x %}a{{ messages[0].role }}{% endset %}{{ x|upper }}{{ x|replace('a', 'b') }}{{ x[1:] }}"
    "{{ x[::-1] }}",
    "numbers": "{{ 2 ** 10 }} {{ 7 // 2 }} {{ 7 % 4 }} {{ 1 / 4 }} {{ '%s-%03d' % ('a', 5) }} {{ [1] * 3 }} {{ -1 }}",
    "lists": "{{ [3, 1, 2]|sort|join(',') }} {{ [1, 2, 3]|sum }} {{ messages|map(attribute='role')|list|unique|join }}"
    "{{ messages|selectattr('role', 'equalto', 'user')|list|length }} {{ [1, 2][1] in (2, 3) }} "
    "{{ {'a': 1}.items()|list }}",
    "texts": "{{ ' a b '.strip().split(' ')|last }}{{ 'x,y'.split(',') }}{{ ','.join(['a', 'b']) }}{{ 'Ab'.lower() }}"
    "{{ 'a'~1~none }}{{ 'abc'|first }}{{ 'a\nb'|indent(2) }}{{ missing is defined }}"
    "{{ missing|default('d') }}{{ missing }}",
    "namespace": "{% set ns = namespace(a=1, b=[]) %}{% for i in range(3) %}{% set ns.a = ns.a + i %}"
    "{% set ns.b = ns.b + [i] %}{% endfor %}{{ ns.a }}{{ ns.b }}{{ dict(a=1) }}",
    "keys": "{% set d = {'a': 1, 2: 3, (4, 5): 6} %}{{ d['a'] }}{{ d[2] }}{{ d[(4, 5)] }}{{ d.get((4, 5)) }}"
    "{{ (4, 5) in d }}{{ d[missing] }}{{ dict([(1, 2)])[1] }}{{ [(1, 2), (1, 2)]|unique|list }}"
    "{{ messages|sum(attribute='n', start=1) if false }}{{ [1, 2]|sum(start=0.5) }}",
    "control": "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 4 %}{% break %}"
    "{% endif %}{{ i }}"
    "{% endfor %}{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{% set j = joiner('/') %}"
    "{{ j() }}x{{ j() }}y",
    "spaces": "  {% if true %}\n  a\n  {% endif %}\n{#- x -#}\n b\n",
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_templates_use_works_as_in_transformers(pairs, name):
    theirs, _ = pairs["bytes"]
    messages = [{"role": "user", "content": "a<b&'\u4e2d\n"}, {"role": "assistant", "content": "c"}]
    expected = theirs.apply_chat_template(messages, chat_template=TEMPLATES[name], tools=[TOOL], tokenize=False)
    assert ChatTemplate(TEMPLATES[name]).render(messages, [TOOL], add_generation_prompt=False) == expected


def test_a_long_conversation_is_no_attack():
    messages = [{"role": "user" if n % 2 else "assistant", "content": "some words " * 500} for n in range(2000)]
    assert len(ChatTemplate(CHAT).render(messages)) > 10**7


def test_errors_say_what_to_change():
    ask = [{"role": "user", "content": "a"}]
    with pytest.raises(ChatError, match="the chat template cannot render these messages: no role nobody; change"):
        ChatTemplate(CHAT).render([{"role": "nobody", "content": "a"}])
    with pytest.raises(ChatError, match=r"x\.jinja: expected a Jinja template, got one that is not"):
        ChatTemplate("{% if %}", where="x.jinja").render(ask)
    with pytest.raises(ChatError, match=r"x\.jinja: expected a Jinja template"):
        ChatTemplate("{% if %}", where="x.jinja").check()
    for messages, message in [
        ("text", "messages must be a list of dictionaries"),
        (["text"], "messages must be a list of dictionaries"),
        ([{"content": object()}], "messages must hold texts, numbers, lists and dictionaries, got a object"),
    ]:
        with pytest.raises(ChatError, match=message):
            ChatTemplate(CHAT).render(messages)
    deep = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(ChatError, match="messages must be nested at most 64 deep"):
        ChatTemplate(CHAT).render([{"content": deep}])


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "lineate.text.sandbox", raising=False)
    with pytest.raises(ImportError, match=r"a chat template needs jinja2, .* pip install 'lineate\[serve\]'"):
        ChatTemplate("x").render([])


@pytest.mark.cover
def test_threads_have_an_allowance_each():
    template, found = ChatTemplate("{% for i in range(50000) %}{{ '' }}{% endfor %}x"), []
    threads = [threading.Thread(target=lambda: found.append(template.render([]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["x"] * 4
