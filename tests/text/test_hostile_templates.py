"""A template from an untrusted folder cannot run code, read files, or use much time or memory."""

import resource

import pytest

from tests.support.marks import slow_but

pytest.importorskip("jinja2")

from lineate.text import ChatError, ChatTemplate

MESSAGES = [{"role": "user", "content": "hello"}]
GROW = "{% set ns = namespace(x=START, y=START) %}{% for i in range(70) %}{% set ns.x = STEP %}{% endfor %}"


def grow(start, step, use=""):
    return GROW.replace("START", start).replace("STEP", step) + use


SHARED = grow("[1]", "[ns.x, ns.x]") + grow("[1]", "[ns.x, ns.x]").replace("ns", "o")
"""Two equal values, each with 2^70 lists if every shared list is counted each time."""

TUPLES = grow("()", "(ns.x, ns.x)")
"""A value whose hash takes 2^70 steps."""
DEEP = grow("()", "(ns.x,)").replace("70", "90000")
"""A value whose hash needs more stack than a process has."""

REFUSED = {
    "classes": "{{ ''.__class__.__mro__ }}",
    "subclasses": "{{ [].__class__.__base__.__subclasses__() }}",
    "globals of a class": "{{ cycler.__init__.__globals__ }}",
    "globals of a function": "{{ raise_exception.__globals__['os'] }}",
    "class by filter": "{{ ''|attr('__class__') }}",
    "class by key": "{{ ''['__class__']['__mro__'] }}",
    "class by map": "{{ messages|map(attribute='__class__.__mro__')|list|first|first }}",
    "the context": "{{ self._TemplateReference__context.environment }}",
    "format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "wide format": "{{ '{:>999999999}'.format(1) }}",
    "a namespace's internals": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "changing messages": "{{ messages.append(1) }}",
    "changing a message": "{{ messages[0].update({'role': 1}) }}",
    "a file": "{% include '/etc/passwd' %}",
    "a module": "{% import 'os' as os %}{{ os }}",
    "a parent": "{% extends '../secret' %}",
    "a large range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "a huge range": "{% for i in range(10 ** 99) %}{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops that skip all": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "loops in macros": "{% macro f() %}{% for i in range(99999) %}x{% endfor %}{% endmacro %}"
    "{% for i in range(999) %}{{ f() }}{% endfor %}",
    "a long text": "{{ 'a' * 10 ** 9 }}",
    "a long list": "{{ ([1] * 10 ** 9)|length }}",
    "a long list of lists": "{{ 10 ** 9 * [1] }}",
    "a large number": "{{ 10 ** (10 ** 10) }}",
    "powers of powers": "{{ ((10 ** 1000) ** 1000) ** 1000 }}",
    "a number that grows": grow("10 ** 100", "ns.x * ns.x"),
    "a text that doubles": grow("'ab'", "ns.x + ns.x"),
    "a joined text that doubles": grow("'ab'", "ns.x ~ ns.x"),
    "a list that doubles": grow("[1]", "ns.x + ns.x"),
    "a text that doubles in a block": "{% set ns = namespace(x='ab') %}{% for i in range(70) %}"
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "shared lists, written": grow("[1]", "[ns.x, ns.x]", "{{ ns.x }}"),
    "shared lists, as JSON": grow("[1]", "[ns.x, ns.x]", "{{ ns.x|tojson }}"),
    "shared lists, as text": grow("[1]", "[ns.x, ns.x]", "{{ ns.x|string|length }}"),
    "shared lists, in upper case": grow("[1]", "[ns.x, ns.x]", "{{ ns.x|upper }}"),
    "shared lists, joined": grow("[1]", "[ns.x, ns.x]", "{{ ns.x ~ '' }}"),
    "shared lists, formatted": grow("[1]", "[ns.x, ns.x]", "{{ '%s' % [ns.x] }}"),
    "shared lists, compared": SHARED + "{{ ns.x == o.x }}",
    "shared lists, found": SHARED + "{{ ns.x in [o.x] }}",
    "shared lists, tested": SHARED + "{{ ns.x is eq(o.x) }}",
    "shared tuples, as a key": TUPLES + "{% set d = {ns.x: 1} %}",
    "shared tuples, looked up": TUPLES + "{{ {}[ns.x] }}",
    "shared tuples, got": TUPLES + "{{ {}.get(ns.x) }}",
    "shared tuples, in a dictionary": TUPLES + "{{ ns.x in {} }}",
    "shared tuples, not in a dictionary": TUPLES + "{{ ns.x not in {} }}",
    "shared tuples, tested in a dictionary": TUPLES + "{{ ns.x is in {} }}",
    "shared tuples, in dict": TUPLES + "{% set d = dict([(ns.x, 1)]) %}",
    "shared tuples, in a namespace": TUPLES + "{% set d = namespace([(ns.x, 1)]) %}",
    "shared tuples, unique": TUPLES + "{{ [ns.x]|unique|list|length }}",
    "shared tuples of a namespace, unique": TUPLES + "{{ [ns]|map(attribute='x')|unique|list|length }}",
    "shared tuples of a namespace, unique by attribute": TUPLES + "{{ [ns]|unique(attribute='x')|list|length }}",
    "shared lists of namespaces, sorted": SHARED + "{{ [ns, o]|sort(attribute='x')|length }}",
    "a wide tuple, unique": "{% set x = (1,) * 99999 %}{{ ([missing] * 60000)|map('default', x)|unique|list|length }}",
    "deep tuples, as a key": DEEP + "{% set d = {ns.x: 1} %}",
    "deep tuples, looked up": DEEP + "{{ {}[ns.x] }}",
    "deep tuples, in a dictionary": DEEP + "{{ ns.x in {} }}",
    "deep tuples, unique": DEEP + "{{ [ns.x]|unique|list|length }}",
    "long keys": "{% set x = 'a' * 999999 %}{% set d = {x ~ '': 1} %}{% for i in range(99999) %}{% set y = d[x] %}"
    "{% endfor %}",
    "a namespace, written": "{% set ns = namespace() %}{% set ns.x = [ns, ns] %}{{ ns }}",
    "wide numbers": "{{ '%999999999d' % 1 }}",
    "wide numbers, by argument": "{{ '%*d' % (999999999, 1) }}",
    "long fractions": "{{ '%.999999999f' % 1 }}",
    "named wide numbers": "{{ '%(a)999999999d' % {'a': 1} }}",
    "ljust": "{{ 'x'.ljust(10 ** 9) }}",
    "zfill": "{{ 'x'.zfill(10 ** 9) }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 9) }}",
    "center": "{{ 'x'|center(10 ** 9) }}",
    "lipsum": "{{ lipsum(n=10 ** 9) }}",
    "to_bytes": "{{ (1).to_bytes(10 ** 9, 'big') }}",
    "indent": "{{ 'x\nx'|indent(10 ** 9) }}",
    "indent of many lines": "{{ ('\n' * 99999)|indent(99999, true, true) }}",
    "JSON, indented": "{{ messages|tojson(indent=10 ** 9) }}",
    "JSON, separated": "{{ ([1] * 9999)|tojson(separators=('x' * 99999, ':')) }}",
    "JSON, deep and indented": "{% set ns = namespace(x=[1] * 99999) %}{% for i in range(400) %}{% set ns.x = [ns.x] %}"
    "{% endfor %}{{ ns.x|tojson(indent=16) }}",
    "replace": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "replace by filter": "{{ ('a' * 99999)|replace('a', 'b' * 99999) }}",
    "replace nothing": "{{ ('a' * 99999).replace('', 'b' * 99999) }}",
    "join": "{{ ('b' * 99999).join(['a'] * 99999) }}",
    "join by filter": "{{ (['a'] * 99999)|join('b' * 99999) }}",
    "batch": "{{ range(99999)|batch(99999, 'x')|list }}",
    "slice": "{{ range(99999)|slice(99999)|list|length }}{{ range(9)|slice(10 ** 9)|list }}",
    "dates": "{{ strftime_now('%999999999d') }}",
    "many slices": "{% set x = 'a' * 999999 %}{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "many comparisons": "{% set x = 'a' * 999999 %}{% set y = 'a' * 999999 %}{% for i in range(99999) %}"
    "{% if x == y %}{% endif %}{% endfor %}",
    "many searches": "{% set x = 'a' * 999999 %}{% for i in range(99999) %}{% if 'b' in x %}{% endif %}{% endfor %}",
    "many methods": "{% set x = 'a' * 999999 %}{% for i in range(99999) %}{% set y = x.upper() %}{% endfor %}",
    "many texts in a block": "{% set x %}{% for i in range(99999) %}" + "y" * 2000 + "{% endfor %}{% endset %}",
    "a macro without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro with two calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(90) }}",
    "a recursive loop": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "sums of lists": "{{ ([[1] * 999] * 9999)|sum(start=[])|length }}",
    "sums of short lists": "{{ (([[1]] * 60000)|sum(start=[]))|length }}",
    "sums of short tuples": "{{ (([(1,)] * 60000)|sum(start=()))|length }}",
    "sums by position": "{{ ([{'a': [1]}] * 6000)|sum('a', [])|length }}",
    "a large number from text": "{{ ('9' * 4000)|int }}",
    "a large hexadecimal number": "{{ ('f' * 99999)|int(base=16) }}",
    **{f"a large number {sign} another": "{{ n " + sign + " 3 }}" for sign in ("+", "-", "*", "/", "//", "%", "**")},
    **{f"3 {sign} a large number": "{{ 3 " + sign + " n }}" for sign in ("+", "-", "*", "/", "//", "%", "**")},
    "deep expressions": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "deep blocks": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "deep loops": "{% for i in [1] %}" * 60 + "{% endfor %}" * 60,
    "many nots": "{{ " + "not " * 20000 + "1 }}",
    "a long source": "x" * (2**18 + 1),
    "sorting": "{% for i in range(99999) %}{% set x = range(99999)|sort %}{% endfor %}",
    "division by zero": "{{ 1 // 0 }}",
    "half a character": "{% set x = '\\ud800' %}{{ x.encode('utf-8') }}",
}  # fmt: skip


ALIKE = [name for name in REFUSED if name.startswith(("shared ", "deep tuples"))]


@pytest.mark.parametrize(
    "name", slow_but(REFUSED, [name for name in REFUSED if name not in ALIKE or name in ALIKE[::6]])
)
def test_hostile_templates_are_refused(name):
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ChatError):
        ChatTemplate(REFUSED[name]).render(MESSAGES, n=1 << 5000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 300_000  # KiB; the texts would be far longer


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}",
        "{{ namespace.__init__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ self.__init__ }}",
    ],
)
def test_internals_are_undefined(source):
    assert ChatTemplate(source).render(MESSAGES) == ""
