"""How many tokens are read again: of a shared beginning, of a conversation, after an edit, after a restart."""

import time
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from lineate.generation.choice import Sampling
from lineate.models import HybridConfig, HybridLM
from lineate.serving.cache.cache import StateCache
from lineate.serving.cache.identity import identity_of
from lineate.serving.engine.engine import Engine
from lineate.serving.engine.requests import Completion, Event, Request
from lineate.text import Bytes, Tokenizer, load_tokenizer
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.serving_models import CONFIG, model, prompt
from tests.support.small_models import random_model

SPACING, LONG = 256, 4096
GREEDY, DRAWN = Sampling(temperature=0), Sampling(temperature=1.5, seed=3)
PATTERNS = ("GA", "KM", "TE", "PL", "GGGA", "KKKM, experts", "LRDG")


def cases(names: str, *quick: tuple, **values: tuple) -> pytest.MarkDecorator:
    """Return all combinations with all patterns as cases of a test; only those in `quick`, of GA, are not slow."""
    every = [(pattern, *rest) for pattern in PATTERNS for rest in product(*values.values())]
    marks = [() if x[0] == "GA" and x[1:] in quick else pytest.mark.slow for x in every]
    return pytest.mark.parametrize(names, [pytest.param(*x, marks=own) for x, own in zip(every, marks, strict=True)])


class Run:
    """An engine with a cache, which may be stopped and started again; counts the tokens that are read.

    Args:
        model: The model.
        folder: Where states are written to; None: nowhere.
        budget: The bytes of the cache.
    """

    def __init__(self, model: HybridLM, folder=None, *, budget: int = 2**28) -> None:
        self.model, self.folder, self.budget = model, folder, budget
        self.read = self.aside = self.before_first = 0
        """The tokens of the last request's prompt that were read, those of its answer that were read again, both in the
        engine's own count, and those that the model had read in all when the first event arrived."""
        self._start()

    def _start(self) -> None:
        named = {} if self.folder is None else {"folder": self.folder, "identity": identity_of(self.model)}
        self.cache = StateCache(self.budget, SPACING, **named, poison=True)
        options = {"slots": 2, "context": 3 * LONG, "spacing": SPACING, "cache": self.cache}
        self.engine = Engine(self.model, **options, poison=True)

    def restart(self) -> None:
        """End the engine and its cache, and begin with new ones."""
        self.engine.stop()
        self.cache.close()
        self._start()

    def ask(self, ids: tuple[int, ...], new: int = 4, sampling: Sampling = DRAWN, **options) -> Completion:
        before, found, tokens, at_events = self.engine.stats, Completion(), [], []

        def listen(event: Event) -> None:
            at_events.append(sum(tokens))
            found.add(event)

        hook = self.model.embed.register_forward_hook(lambda module, inputs, output: tokens.append(inputs[0].numel()))
        try:
            self.engine.submit(Request(ids, sampling, max_new_tokens=new, **options), listen)
            while self.engine.step():
                pass
        finally:
            hook.remove()
        assert found.finished in ("length", "stop"), found
        stats, self.before_first = self.engine.stats, at_events[0]
        self.read, self.aside = stats.read_tokens - before.read_tokens, stats.reread_tokens - before.reread_tokens
        return found


@cache
def fresh(model: HybridLM, ids: tuple[int, ...], new: int = 4, sampling: Sampling = DRAWN) -> list[int]:
    """Return the tokens that a new engine without a cache yields."""
    engine = Engine(model, slots=1, context=3 * LONG, spacing=SPACING)
    handle = engine.submit(Request(ids, sampling, max_new_tokens=new))
    while engine.step():
        pass
    return handle.result(0)[0].tokens


@pytest.mark.cover
@cases("pattern, restarted", (False,), (True,), restarted=(False, True))
def test_a_shared_beginning_is_read_once(pattern, restarted, tmp_path):
    """Of 4,096 tokens none is read again, whatever follows them, nor if nothing follows."""
    lm, beginning = model(pattern), prompt(LONG)
    run = Run(lm, tmp_path if restarted else None)
    cold = run.ask((*beginning, *prompt(40, seed=1)))
    assert (cold.cached_tokens, run.read) == (0, LONG + 40)
    for more in (prompt(30, seed=2), ()):
        if restarted:
            run.restart()
        ids = (*beginning, *more)
        found = run.ask(ids)
        assert (found.cached_tokens, run.read) == (LONG, len(more))
        assert found.tokens == fresh(lm, ids)
        again = run.ask(ids)
        assert (again.cached_tokens, run.read, again.tokens) == (len(ids), 0, found.tokens)


def test_a_shared_beginning_that_ends_between_two_cuts():
    """All prompts after the first are read from the last cut before they part."""
    lm, beginning = model("GA"), prompt(SPACING + 100)
    run = Run(lm)
    for n in range(4):
        ids = (*beginning, n, *prompt(40, seed=n))
        found = run.ask(ids)
        assert found.cached_tokens == (SPACING if n else 0)
        assert found.tokens == fresh(lm, ids)


@pytest.mark.cover
@cases(
    "pattern, length, restarted", (LONG + 99, False), (LONG + 130, True),
    length=(LONG, LONG + 99, LONG + 101, LONG + 130), restarted=(False, True),
)  # fmt: skip
def test_an_edit_before_the_end(pattern, length, restarted, tmp_path):
    """Any number of edits 100 tokens before the end read at most spacing + 100 tokens again each."""
    lm, ids = model(pattern), prompt(length)
    run = Run(lm, tmp_path if restarted else None)
    run.ask(ids)
    for change in (1, 2):
        edited = (*ids[:-100], (ids[-100] + change) % 61, *ids[-99:])
        if restarted:
            run.restart()
        found = run.ask(edited)
        assert run.before_first == run.read == length - found.cached_tokens <= SPACING + 100
        assert found.cached_tokens == (length - 100) // SPACING * SPACING
        assert found.tokens == fresh(lm, edited)


@pytest.mark.cover
@cases("pattern, restarted", (True,), restarted=(False, True))
def test_a_conversation_reads_only_the_new_turn(pattern, restarted, tmp_path):
    """Ten turns: what the user adds is read, after less than a piece; answers were read again after they ended."""
    lm, ids = model(pattern), prompt(300, seed=9)
    run, before, aside = Run(lm, tmp_path if restarted else None), 0, 0
    for turn in range(10):
        found = run.ask(ids, new=20)
        assert turn % 3 or found.tokens == fresh(lm, ids, new=20)
        assert found.cached_tokens == before // SPACING * SPACING
        assert run.before_first == run.read == len(ids) - found.cached_tokens
        assert not turn or run.read < SPACING + 30
        before, aside = len(ids) + 20, aside + run.aside
        ids = (*ids, *found.tokens, *prompt(30, seed=turn))
        if restarted:
            run.restart()
    assert aside == 2 * SPACING  # the answers in which the text passed a multiple of the spacing


@pytest.mark.cover
def test_evictions_cost_tokens_but_change_none():
    """A budget of three states of a conversation: it goes on from whatever is left."""
    lm, ids = model("GA"), prompt(700, seed=9)
    run = Run(lm, budget=3 * model("GA").state_nbytes(1, 1000))
    for turn in range(5):
        found = run.ask(ids, new=10)
        assert found.tokens == fresh(lm, ids, new=10)
        run.ask(prompt(900, seed=50 + turn))
        ids = (*ids, *found.tokens, *prompt(10, seed=turn))
    assert run.cache.stats.evictions > 10
    assert run.cache.stats.bytes <= run.budget


@pytest.fixture
def serve():
    """Return what serves an engine: a function that gives a client of a running server."""
    pytest.importorskip("fastapi")
    pytest.importorskip("llguidance")
    httpx = pytest.importorskip("httpx")
    from lineate.serving.api.service import Description
    from tests.support.live_server import live

    description = Description("tiny", context=4096, slots=1, created=0, fingerprint="x")
    with ExitStack() as stack:

        def start(engine, tokenizer: Tokenizer):
            server = stack.enter_context(live(engine, tokenizer, description))
            return stack.enter_context(httpx.Client(base_url=server.url, timeout=60))

        yield start


def settle(engine: Engine) -> None:
    """Wait until no answer is left to read again."""
    for _ in range(6000):
        if not engine.stats.waiting_answers:
            return
        time.sleep(0.01)
    raise AssertionError("answers were not read again")


def answered(client, messages: list[dict], **options) -> dict:
    """Ask for the next message of a chat, add it to the messages, and return the whole answer."""
    answer = client.post("/v1/chat/completions", json={"messages": messages, **options}).raise_for_status().json()
    messages.append(answer["choices"][0]["message"])
    return answer


def with_letters(tokenizer: Tokenizer, *more: int) -> dict[str, int]:
    """Return biases with which only letters are drawn, so that decoding and encoding an answer gives its tokens."""
    return {str(i): 100 for i in (*map(lambda x: tokenizer.encode(x)[0], "abcdefghijklmnopqrstuvwxyz"), *more)}


def small_config(tokenizer: Tokenizer) -> HybridConfig:
    return replace(CONFIG, vocab_size=tokenizer.vocab_size, n_layers=2, pattern="GA")


@pytest.mark.cover
def test_a_chat_reads_only_the_new_message(serve, tmp_path):
    """Ten turns through the server and the chat template, with a restart in the middle; only less than a piece more."""
    tokenizer = chat_tokenizer()
    (end,) = tokenizer.encode_rendered("<|im_end|>")
    run = Run(random_model(small_config(tokenizer)), tmp_path)
    run.engine.start()
    client = serve(run.engine, tokenizer)
    messages: list[dict] = [{"role": "system", "content": "Answer in letters. " * 20}]
    reasons, before = set(), 0
    for turn in range(10):
        if turn == 5:
            run.restart()
            run.engine.start()
            client = serve(run.engine, tokenizer)
        messages.append({"role": "user", "content": f"Question {turn}"})
        options = {"logit_bias": with_letters(tokenizer, end), "max_tokens": 20, "seed": turn}
        answer = answered(client, messages, **options)
        usage = answer["usage"]
        assert answer["lineate"]["read_tokens"] == usage["prompt_tokens"] - before // SPACING * SPACING
        if turn:
            new = f"\n<|im_start|>user\nQuestion {turn}<|im_end|>\n<|im_start|>assistant\n"
            assert answer["lineate"]["read_tokens"] <= SPACING + len(tokenizer.encode_rendered(new))
        before = usage["total_tokens"]
        reasons.add(answer["choices"][0]["finish_reason"])
        settle(run.engine)
    run.engine.stop()
    assert reasons == {"stop", "length"}


@pytest.mark.cover
def test_a_chat_whose_template_rewrites_the_last_answer(serve):
    """A template that opens every answer with <think>, and leaves that out later: one goes on from the last cut."""
    tokenizer = chat_tokenizer(think="<think>\n")
    run = Run(random_model(small_config(tokenizer)))
    run.engine.start()
    client = serve(run.engine, tokenizer)
    messages: list[dict] = [{"role": "system", "content": "Answer in letters. " * 20}]
    before = 0
    for turn in range(10):
        messages.append({"role": "user", "content": f"Question {turn} " * 4})
        options = {"logit_bias": with_letters(tokenizer), "max_tokens": 20, "seed": turn}
        usage = answered(client, messages, **options)["usage"]
        kept = max(before - len(tokenizer.encode_rendered("<think>\n")), 0)
        assert usage["prompt_tokens_details"]["cached_tokens"] == kept // SPACING * SPACING
        before = usage["prompt_tokens"]
    run.engine.stop()


THOUGHT = "<think>\nI wonder.\n</think>\n\n"
NOTHING = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("tokenizer", "answer", "following", "options", "shared"),
    [
        pytest.param("plain", "It is so.", "why", {}, "answer", id="a plain template"),
        pytest.param("none", " It is so.", "why", {}, "answer", id="no template"),
        pytest.param("qwen", "It is so.", "why", {}, "answer", id="without thoughts"),
        pytest.param("qwen", f"{THOUGHT}It is so.", "<tool>4", {}, "answer", id="thoughts before a tool's result"),
        pytest.param("qwen", f"{THOUGHT}It is so.", "why", {}, "prompt", id="thoughts that are left out later"),
        pytest.param("qwen", "It is so.", "why", {"enable_thinking": False}, "role", id="a thought that is none"),
    ],
)
def test_what_the_next_prompt_begins_with(serve, tokenizer, answer, following, options, shared, tmp_path):
    """The next prompt begins with the last one and its answer, unless the template drops thoughts; then with less."""
    from tests.support.live_server import ScriptedEngine

    if tokenizer == "qwen":
        pytest.importorskip("transformers")
        from tests.support.published import make_published

        make_published("bytes", tmp_path)
    tokenizer = {"plain": chat_tokenizer, "none": Bytes, "qwen": lambda: load_tokenizer(tmp_path)}[tokenizer]()
    engine = ScriptedEngine(tokenizer.encode_rendered, lambda request, index: answer)
    client, messages = serve(engine, tokenizer), [{"role": "system", "content": "Be brief."}]
    for content in ("what", following):
        messages.append({"role": "user", "content": content})
        answered(client, messages, **({"chat_template_kwargs": options} if options else {}))
    first, second = (handle.request.ids for handle in engine.handles)
    whole = (*first, *tokenizer.encode_rendered(answer))
    opened = len(tokenizer.encode_rendered(NOTHING))
    expected = {"answer": whole, "prompt": first, "role": first[:-opened]}[shared]
    assert second[: len(expected)] == expected
    assert shared == "answer" or second[len(expected)] != whole[len(expected)]
