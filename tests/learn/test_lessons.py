"""Every lesson runs and its claims hold; a broken rule is noticed by them."""

import ast
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import lineate
from lineate import planning
from lineate.layers.rope import rotate, turns
from lineate.learn.disagreements import DISAGREEMENTS, SETUP, run_disagreement
from lineate.learn.lesson import Equality, Measure, execute, run
from lineate.learn.lessons import all_lessons, lesson_at

LESSONS = all_lessons()
LARGEST_TOLERANCE = 1e-5
MOST_LINES = 40


def shown(findings):
    return [(finding.claim.says, finding.value) for finding in findings if not finding.holds]


@pytest.mark.parametrize("number", LESSONS)
def test_a_lesson_holds(number, capsys):
    before = torch.random.get_rng_state()
    outcome = run(LESSONS[number])
    assert outcome.printed.strip() and capsys.readouterr().out == ""
    assert shown((*outcome.findings, *outcome.answers)) == []
    assert outcome.holds
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("number", LESSONS)
def test_a_lesson_is_whole(number):
    lesson = LESSONS[number]
    equalities = [claim for claim in lesson.claims if isinstance(claim, Equality)]
    assert equalities and all(0 <= claim.tolerance <= LARGEST_TOLERANCE for claim in equalities)
    assert all(claim.least <= claim.most for claim in lesson.claims if isinstance(claim, Measure))
    texts = (lesson.title, lesson.equation, lesson.text, lesson.picture.caption, lesson.next)
    assert all(text.strip() for text in (*texts, lesson.exercise.question, lesson.exercise.answer))
    assert len(lesson.code.splitlines()) <= MOST_LINES
    assert "print(" in lesson.code and "print(" not in lesson.exercise.code  # an answer is told by its claims
    assert lesson.exercise.claims  # an answer is checked too


def test_lessons_in_two_threads_do_not_change_each_other():
    alone = {number: run(LESSONS[number]).names["v"] for number in (2, 5)}
    with ThreadPoolExecutor(2) as threads:
        for number, outcome in [(n, threads.submit(run, LESSONS[n])) for n in (2, 5) * 8]:
            assert torch.equal(outcome.result().names["v"], alone[number])


def test_names_are_unique():
    names = [lesson.name for lesson in LESSONS.values()]
    assert len(set(names)) == len(names) == 12
    assert not {"all", "disagreements"} & set(names)


@pytest.mark.parametrize("each", DISAGREEMENTS, ids=lambda each: each.name)
def test_a_disagreement_holds(each):
    findings = run_disagreement(each)
    assert shown(findings) == []
    assert any(isinstance(finding.claim, Equality) for finding in findings)


def used(code):
    """Return the names of lineate's attributes that a program reads."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "lineate"}


OPS = {name: getattr(lineate, name) for name in dir(lineate)}
softmax, linear, gated_linear = OPS["softmax_attention"], OPS["linear_attention"], OPS["gated_linear_attention"]
plan_memory = planning.plan_memory


def unscaled(q, k, v, scale=None):
    """Softmax attention without 1/sqrt(k)."""
    return softmax(q, k, v, scale=1.0)


def with_positions(q, k, v, scale=None):
    """Softmax attention with rotary positions."""
    turn = turns(torch.arange(q.shape[1]), q.shape[-1] // 2 * 2, 100.0, q.dtype)
    return softmax(rotate(q, turn), rotate(k, turn), v, scale=scale)


def fading(q, k, v, *, scale=None, **_):
    """Linear attention that forgets one percent a token."""
    return gated_linear(q, k, v, torch.full(v.shape[:3], -0.01, dtype=v.dtype), scale=scale)


def forgetful_chunks(q, k, v, *, scale=None, form="auto", chunk_size=None):
    """Linear attention whose chunkwise form does not carry the state."""
    if form != "chunkwise":
        return linear(q, k, v, scale=scale, form=form)
    parts = [linear(*x, scale=scale) for x in zip(*(y.split(chunk_size or 64, 1) for y in (q, k, v)), strict=True)]
    return lineate.Attended(torch.cat([part.output for part in parts], 1), parts[-1].state)


def late_decay(q, k, v, log_decay, **options):
    """A decay that acts one token late."""
    return gated_linear(q, k, v, torch.cat((0 * log_decay[:, :1], log_decay[:, :-1]), 1), **options)


def adding(q, k, v, beta, *, scale=None, state=None, form="auto"):
    """The delta rule without its comparison."""
    beta = beta if beta.dim() == 4 else beta[..., None]
    return linear(q, k, beta * v, scale=scale, state=state)


def by_tokens(keep):
    """Return an op that walks token by token: S = keep(S, what S holds for the key) + beta k v^T."""

    def op(q, k, v, log_decay, beta, *, scale=None, state=None, form="auto", normalize_qk=False):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        S = q.new_zeros(v.shape[0], v.shape[2], q.shape[-1], v.shape[-1]) if state is None else state
        decays = log_decay.exp() if log_decay.dim() == 4 else log_decay.exp()[..., None]
        outputs = []
        for x, key, value, decay, rate in zip(*(y.unbind(1) for y in (q, k, v, decays, beta)), strict=True):
            write = rate[..., None, None] * key[..., None]  # b h k 1
            held = torch.einsum("bhkv,bhk->bhv", S, key)[..., None, :]
            S = keep(S, decay[..., None], write * held) + write * value[..., None, :]
            outputs.append(scale * torch.einsum("bhkv,bhk->bhv", S, x))
        return lineate.Attended(torch.stack(outputs, 1), S)

    return op


compared_before_decay = by_tokens(lambda S, decay, erased: decay * S - erased)  # descent at one point
erased_before_decay = by_tokens(lambda S, decay, erased: decay * (S - erased))  # the other order of KDA


def half_state(model, state_dtype="bfloat16"):
    """A plan that counts the recurrent state in two bytes."""
    return plan_memory(model, state_dtype)


BROKEN = {
    1: ("softmax_attention", unscaled),
    2: ("linear_attention", fading),
    3: ("linear_attention", forgetful_chunks),
    4: ("linear_attention", fading),
    5: ("gated_linear_attention", late_decay),
    6: ("delta_rule", adding),
    7: ("delta_rule", adding),
    8: ("gated_delta_rule", compared_before_decay),
    9: ("kimi_delta_attention", erased_before_decay),
    10: ("delta_rule", adding),
    11: ("softmax_attention", with_positions),
    12: ("plan_memory", half_state),
}
"""For every lesson an op or function that its program uses, and a wrong one in its place."""


@pytest.mark.parametrize("number", BROKEN)
def test_a_broken_rule_is_noticed(number, monkeypatch):
    name, wrong = BROKEN[number]
    lesson = lesson_at(number)
    home = planning if name == "plan_memory" else lineate
    if home is lineate:
        claims = "\n".join(claim.left for claim in lesson.claims if isinstance(claim, Equality))
        assert name in used(lesson.code) | used(claims)
    monkeypatch.setattr(home, name, wrong)
    outcome = run(lesson)
    assert [x for x in outcome.findings if isinstance(x.claim, Equality) and not x.holds]
    assert not outcome.holds


@pytest.mark.parametrize(
    ("name", "op", "wrong"),
    [
        ("order", "kimi_delta_attention", erased_before_decay),
        ("one point", "gated_delta_rule", compared_before_decay),
        ("side", "gated_linear_attention", late_decay),
        ("mask", "softmax_attention", unscaled),
        ("state layout", "kimi_delta_attention", erased_before_decay),
        ("norm", "delta_rule", adding),
    ],
)
def test_a_broken_rule_is_noticed_by_a_disagreement(name, op, wrong, monkeypatch):
    monkeypatch.setattr(lineate, op, wrong)
    findings = run_disagreement(next(each for each in DISAGREEMENTS if each.name == name))
    assert [x for x in findings if isinstance(x.claim, Equality) and not x.holds]


def test_float32_is_refused_and_nan_never_equals():
    names = {"x": torch.zeros(2), "nan": torch.full((2,), torch.nan, dtype=torch.float64), "torch": torch}
    with pytest.raises(TypeError, match=r"x must be float64, got torch\.float32"):
        Equality("", "x", "x").check(names)
    assert not Equality("", "nan", "nan").check(names).holds
    with pytest.raises(ValueError, match="one shape"):
        Equality("", "nan", "nan[:1]").check(names)


def test_an_error_in_a_program_shows_its_line():
    with pytest.raises(ZeroDivisionError) as caught:
        execute("x = 1\ny = x / 0\n", "wrong")
    assert "y = x / 0" in str(caught.getrepr(style="native"))


def test_the_setup_runs_alone():
    assert {"walk", "gdn", "kda", "far"} <= set(execute(SETUP, "setup"))
