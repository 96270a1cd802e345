"""Random sequences of calls of the state cache, compared with a plain dict of prefixes.

Rules keep, find, restart, kill and damage; budgets are small, so that states are given up and written to disk all the
time. After every call the bytes are summed up again, and whatever was given up must be gone and overwritten.
"""

import shutil
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lineate.layers import Memory, TokenCache
from lineate.models import ModelState
from lineate.serving.cache.cache import StateCache
from tests.support.kept_states import held, same

SPACING = 4
TOKENS = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=4)
KEEPING = st.fixed_dictionaries(
    {
        "with_logits": st.booleans(),
        "cost": st.sampled_from([0.0, 0.1, 5.0]),
    }
)
PLENTY = 10**7


@dataclass
class Variant:
    """A state as it was kept: its bits in tensors of their own."""

    state: ModelState
    logits: torch.Tensor | None


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        budget=st.sampled_from([0, 200, 600, 1500, PLENTY]),
        folder_bytes=st.sampled_from([None, 0, 6000, PLENTY]),
        caches=st.booleans(),
        seed=st.integers(0, 99),
    )
    def begin(self, budget, folder_bytes, caches, seed):
        torch.manual_seed(seed)
        self.place = Path(tempfile.mkdtemp())
        self.folder = None if folder_bytes is None else self.place / "0"
        self.budget, self.folder_bytes, self.with_caches = budget, folder_bytes, caches
        self.copies, self.last_found = 0, None
        self.live: list[tuple[tuple[int, ...], ModelState]] = []
        self.kept: dict[tuple[int, ...], list[Variant]] = {}
        self.lossless = budget == PLENTY or folder_bytes == PLENTY
        """Whether nothing that was kept may be missing."""
        self.tracked: list[weakref.ref] = []
        self.open()

    def open(self):
        options = {} if self.folder is None else {"folder": self.folder, "folder_bytes": self.folder_bytes}
        self.cache = StateCache(self.budget, SPACING, identity="a model", poison=True, **options)

    def entries(self, n: int) -> list[dict[str, torch.Tensor]]:
        first = {"keys": torch.randn(1, n, 2).bfloat16(), "values": torch.randn(1, n, 1)}
        return [first, {"latent": torch.randn(1, n, 3)}]

    def memory(self) -> Memory:
        return Memory({"memory": torch.randn(1, 3, 2), "position": torch.randint(99, (1,))})

    @rule(ids=TOKENS, how=KEEPING)
    def read_from_the_start(self, ids, how):
        caches = [TokenCache(x, len(ids)) for x in self.entries(len(ids))] if self.with_caches else []
        self.live.append((tuple(ids), ModelState((self.memory(), *caches), len(ids))))
        self.keep_one(*self.live[-1], **how)

    @precondition(lambda self: self.live)
    @rule(ids=TOKENS, which=st.integers(0, 99), how=KEEPING)
    def read_on(self, ids, which, how):
        before, state = self.live[which % len(self.live)]
        caches = []
        with torch.no_grad():
            for cache, new in zip(state.layers[1:], self.entries(len(ids)), strict=False):
                caches.append(cache.append(new))
        self.live.append(((*before, *ids), ModelState((self.memory(), *caches), state.lengths + len(ids))))
        self.keep_one(*self.live[-1], **how)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), how=KEEPING)
    def keep_again(self, which, how):
        self.keep_one(*self.live[which % len(self.live)], **how)

    def keep_one(self, ids, state, with_logits, cost):
        logits = torch.randn(5) if with_logits or len(ids) % SPACING else None
        before = self.cache.stats
        done = self.cache.keep(list(ids), state, logits, cost)
        if not done:
            assert state.nbytes > self.budget - (0 if logits is None else 20)
            assert self.cache.stats.evictions == before.evictions  # nothing goes for what does not fit
            return
        new = Variant(state.select(torch.tensor([0])), None if logits is None else logits.clone())
        old = self.kept.setdefault(ids, [])
        if not old or (logits is not None and old[-1].logits is None) or not self.lossless:
            if self.lossless:
                old.clear()
            old.append(new)

    @rule(ids=TOKENS)
    def find(self, ids):
        """Ask for every prompt that was read, with and without other tokens after it."""
        for begun in {(), *(prompt for prompt, _ in self.live)}:
            for prompt in ((*begun, *ids), begun):
                self.check(prompt, self.cache.find(list(prompt)))

    def check(self, prompt, found):
        served = [length for length in range(1, len(prompt) + 1) if self.serves(prompt, length)]
        if found is None:
            assert not (served and self.lossless)
            return
        ids = prompt[: found.length]
        variants = [x for x in self.kept.get(ids, ()) if same(x.state, found.state)]
        assert any(
            x.logits is found.logits is None or (None not in (x.logits, found.logits) and x.logits.equal(found.logits))
            for x in variants
        )
        assert found.length in served and (found.length == served[-1] or not self.lossless)
        self.last_found = ids, found.state

    @precondition(lambda self: self.last_found is not None)
    @rule()
    def go_on_from_what_was_found(self):
        self.live.append(self.last_found)
        self.last_found = None

    def serves(self, prompt, length) -> bool:
        """Whether a state of these tokens serves the prompt: at a multiple of the spacing, or at its end."""
        kept = self.kept.get(prompt[:length], ())
        return any(x.logits is not None if length == len(prompt) else length % SPACING == 0 for x in kept)

    @rule(what=st.sampled_from(["clear", "restart", "restart", "kill", "damage", "damage"]), data=st.data())
    def upset(self, what, data):
        if what == "damage":
            how = data.draw(st.sampled_from(["flip", "flip", "cut", "empty", "swap", "remove", "more"]))
            self.damage(data.draw(st.integers(0, 999)), how, data.draw(st.floats(0, 1)))
        elif what != "kill" or self.folder is not None:
            getattr(self, what)()

    def clear(self):
        self.cache.clear()
        self.kept.clear()
        stats = self.cache.stats
        assert stats.bytes == stats.nodes == stats.files == 0

    def restart(self):
        self.cache.close()
        assert self.cache.stats.bytes == 0 and self.cache.find([0, 1, 0]) is None
        if self.folder_bytes != PLENTY:
            self.lossless = False
            if self.folder is None:
                self.kept.clear()
        self.open()

    def kill(self):
        """Go on with the files as they are at this moment."""
        self.copies += 1
        copied = self.place / str(self.copies)
        shutil.copytree(self.folder, copied)
        self.cache.close()
        self.folder, self.lossless = copied, False
        self.open()

    def damage(self, which, how, at):
        files = [] if self.folder is None else sorted(self.folder.glob("*/*.safetensors"))
        if not files:
            return
        self.lossless = False
        file, other = files[which % len(files)], files[(which + 1) % len(files)]
        text = bytearray(file.read_bytes())
        where = min(int(at * len(text)), len(text) - 1)
        if how == "remove":
            file.unlink()
        elif how == "flip" and text:
            text[where] ^= 1 << which % 8
            file.write_bytes(text)
        else:
            new = {"cut": text[:where], "empty": b"", "swap": other.read_bytes(), "more": text + b"x"}
            file.write_bytes(new.get(how, b""))

    @invariant()
    def bytes_are_exact_and_within_the_budgets(self):
        stats = self.cache.stats
        assert stats.bytes == held(self.cache) <= self.budget
        assert not any(x.is_floating_point() and x.isnan().any() for x in self.cache.tensors())
        if self.folder is not None:
            assert stats.file_bytes <= self.folder_bytes
            if self.lossless:
                assert stats.file_bytes == sum(x.stat().st_size for x in self.folder.glob("*/*.safetensors"))
            assert list(self.folder.glob("*/*.part")) == []

    @invariant()
    def what_was_given_up_is_gone(self):
        now = list(self.cache.tensors())
        kept = {id(x) for x in now}
        for tracked in self.tracked:
            assert (x := tracked()) is None or id(x) in kept
        self.tracked = [weakref.ref(x) for x in now]

    def teardown(self):
        if hasattr(self, "cache"):
            self.cache.close()
            assert self.cache.stats.bytes == self.cache.stats.nodes == 0
            shutil.rmtree(self.place)


TestCacheMachine = pytest.mark.cover(CacheMachine.TestCase)
TestCacheMachine.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
