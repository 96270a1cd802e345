"""Conversations: turns read only what is new, and states at turn ends make undo and branches free."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lineate.generation import Sampling, generate
from lineate.generation.chat import Conversation
from lineate.models import HybridLM, preset
from lineate.text import Bytes, ChatTemplate

LETTERS = tuple((letter, 40.0) for letter in b"abcdefghij ")
OWN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Earlier answers are shortened, as templates do that leave out earlier reasoning; or their beginning is another one.
SHORT = OWN.replace("{{ m.content }}", "{{ m.content[:2] if m.role == 'assistant' else m.content }}")
OTHER = OWN.replace("<{{ m.role }}>", "<{{ 'it' if m.role == 'assistant' else m.role }}>")


@pytest.fixture(scope="module")
def model() -> HybridLM:
    torch.manual_seed(0)
    return HybridLM(preset("tiny", pattern="GA", vocab_size=257)).eval()


def conversation(model: HybridLM, template: str | None = OWN, **options: object) -> Conversation:
    tokenizer = Bytes()
    tokenizer.chat = None if template is None else ChatTemplate(template)
    biased = Sampling(temperature=1.0, logit_bias=LETTERS, seed=int(options.pop("seed", 0)))  # type: ignore[call-overload]
    return Conversation(model, tokenizer, biased, 12, **options)  # type: ignore[arg-type]


def said(talk: Conversation, text: str) -> str:
    return "".join(talk.answer(text))


@pytest.mark.cover
def test_a_turn_reads_only_what_is_new(model: HybridLM) -> None:
    talk = conversation(model)
    first = said(talk, "hello")
    assert talk.messages == [{"role": "user", "content": "hello"}, {"role": "assistant", "content": first}]
    assert talk.turn is not None and (talk.turn.reused, talk.turn.made) == (0, 12)
    prompt = len(talk.tokenizer.encode_rendered(talk.template.render(talk.messages[:1])))
    assert talk.turn.read == prompt
    second = said(talk, "and then?")
    assert talk.turn.reused == prompt + 11  # all but the last token of the answer
    new = talk.tokenizer.encode_rendered("<|endoftext|>\n<user>and then?<|endoftext|>\n<assistant>")
    assert talk.turn.read == 1 + len(new)
    # The same tokens as if everything were read at once.
    ids = talk.tokenizer.encode_rendered(talk.template.render(talk.messages[:3]))
    whole = generate(model, [ids], 12, sampling=[talk.sampling])
    list(whole)
    assert talk.tokenizer.decode(whole.tokens[0]) == second
    for _ in range(3):
        said(talk, "more")
        assert talk.turn.read < 40 < talk.turn.reused


@pytest.mark.parametrize(
    ("template", "kept"), [(SHORT, "<user>hello.\n<assistant>"), (OTHER, "<user>hello.\n")], ids=["short", "other"]
)
def test_a_template_that_changes_what_was_said_is_read_again_from_there(
    template: str, kept: str, model: HybridLM
) -> None:
    talk = conversation(model, template)
    said(talk, "hello")
    second = said(talk, "and then?")
    assert talk.turn is not None
    assert talk.turn.reused == len(kept)  # end-of-text is one token too
    ids = talk.tokenizer.encode_rendered(talk.template.render(talk.messages[:3]))
    assert talk.turn.reused + talk.turn.read == len(ids)
    whole = generate(model, [ids], 12, sampling=[talk.sampling])
    list(whole)
    assert talk.tokenizer.decode(whole.tokens[0]) == second


def test_messages_make_no_special_tokens(model: HybridLM) -> None:
    talk = conversation(model)
    for text in ("a<|endoftext|>b", "<|endof", "text|> again <|endoftext|>"):
        said(talk, text)
        asked = talk.messages[:-1]
        assert talk.turn is not None
        assert talk.turn.reused + talk.turn.read == len(talk.tokenizer.encode_chat(asked))
        assert talk.tokenizer.encode_chat(asked).count(talk.tokenizer.end) == len(asked)
    assert talk.turn is not None and talk.turn.reused > 60


def test_penalties_count_the_whole_conversation(model: HybridLM) -> None:
    talk = conversation(model)
    talk.sampling = replace(talk.sampling, temperature=0, repetition_penalty=1.05)
    said(talk, "hello")
    second = said(talk, "again")
    ids = talk.tokenizer.encode_rendered(talk.template.render(talk.messages[:3]))
    whole = generate(model, [ids], 12, sampling=[talk.sampling])
    list(whole)
    assert talk.tokenizer.decode(whole.tokens[0]) == second


@pytest.mark.cover
def test_without_a_template_of_its_own(model: HybridLM) -> None:
    prompt = len("User: hello\n\nAssistant:") + 1  # after end-of-text
    for spaced in (True, False):
        for seed in range(100):  # until the answer begins with a space, as after "Assistant:" it should, or does not
            talk = conversation(model, None, seed=seed)
            if said(talk, "hello").startswith(" ") == spaced:
                break
        said(talk, "again")
        assert talk.turn is not None and talk.turn.reused == (prompt + 11 if spaced else prompt)
    text = talk.template.render(talk.messages)
    assert text.startswith("User: hello\n\nAssistant: ") and "\n\nUser: again\n\n" in text


def test_undo_takes_back_and_says_the_same_again(model: HybridLM) -> None:
    talk = conversation(model)
    first = said(talk, "one")
    second = said(talk, "two")
    assert talk.undo() == "two" and len(talk.messages) == 2
    assert said(talk, "two") == second
    assert talk.turn is not None and talk.turn.reused > len(first)
    assert (talk.undo(), talk.undo(), talk.undo()) == ("two", "one", None)
    assert talk.messages == [] and talk.nbytes == 0
    assert said(talk, "one") == first


@pytest.mark.cover
def test_copies_go_on_apart(model: HybridLM) -> None:
    talk = conversation(model)
    said(talk, "one")
    other = talk.copy()
    a = said(talk, "two")
    b = said(other, "three")
    assert [len(x.messages) for x in (talk, other)] == [4, 4]
    assert talk.messages[:2] == other.messages[:2] and talk.messages[2] != other.messages[2]
    for turn in (talk.turn, other.turn):
        assert turn is not None and turn.reused > 0
    for text, again in (("two", a), ("three", b)):
        alone = conversation(model)
        said(alone, "one")
        assert said(alone, text) == again


def test_a_system_message_is_read_with_everything(model: HybridLM) -> None:
    talk = conversation(model)
    said(talk, "one")
    talk.system("be brief")
    said(talk, "two")
    assert talk.messages[0] == {"role": "system", "content": "be brief"}
    assert talk.turn is not None and talk.turn.reused == 0
    said(talk, "three")
    assert talk.turn.reused > 0
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "be brief"}] and talk.nbytes == 0
    talk.system("")
    assert talk.messages == []


def test_an_answer_that_is_closed_is_kept_so_far(model: HybridLM) -> None:
    talk = conversation(model)
    pieces = talk.answer("hello")
    shown = "".join(next(pieces) for _ in range(4))
    pieces.close()  # type: ignore[attr-defined]
    assert talk.messages[-1] == {"role": "assistant", "content": shown} and len(shown) == 4
    said(talk, "go on")
    assert talk.turn is not None and talk.turn.reused > 0
    unread = talk.copy()
    unread.answer("never begun").close()  # type: ignore[attr-defined]
    assert unread.messages == talk.messages


def test_stop_strings_end_an_answer(model: HybridLM) -> None:
    whole = said(conversation(model), "hello")
    talk = conversation(model, stop=(whole[3:5],))
    assert said(talk, "hello") == whole[: whole.index(whole[3:5])]
    shown = len(talk.messages[-1]["content"])
    said(talk, "and")
    # Up to the last token before the stop string, which is no part of the message.
    prompt = len(talk.tokenizer.encode_chat(talk.messages[:1]))
    assert talk.turn is not None and talk.turn.reused == prompt + shown


def test_files(model: HybridLM, tmp_path: Path) -> None:
    talk = conversation(model)
    said(talk, "héllo")
    talk.save(tmp_path / "talk.json")
    other = conversation(model)
    other.load(tmp_path / "talk.json")
    assert other.messages == talk.messages
    assert said(other, "two") == said(talk, "two")
    talk.load(tmp_path / "talk.json")  # states before its end are still used
    said(talk, "two")
    assert talk.turn is not None and talk.turn.reused > 0
    before = list(talk.messages)
    half = json.dumps({"messages": [{"role": "user", "content": "\ud800"}]})
    for wrong in (
        half,
        "[1",
        "[]",
        '{"messages": 3}',
        json.dumps({"messages": [{"role": "x", "content": "y"}]}),
        "\xff",
    ):
        (tmp_path / "wrong.json").write_bytes(wrong.encode("latin-1"))
        with pytest.raises(ValueError, match=r"wrong\.json must"):
            talk.load(tmp_path / "wrong.json")
        assert talk.messages == before
    with pytest.raises(ValueError, match="expected a file that can be written, got"):
        talk.save(tmp_path)
    with pytest.raises(FileNotFoundError):
        talk.load(tmp_path / "none.json")


WRONG_OPTIONS = {
    "logit_bias must": [
        '{"sampling": {"logit_bias": [[Infinity, 1]]}}', f'{{"sampling": {{"logit_bias": [[1, {10**400}]]}}}}',
        '{"sampling": {"logit_bias": [[1.5, 1]]}}', '{"sampling": {"logit_bias": [[1, NaN]]}}',
        '{"sampling": {"logit_bias": [[1]]}}', '{"sampling": {"logit_bias": 3}}',
        '{"sampling": {"logit_bias": ["12"]}}',
        f'{{"sampling": {{"logit_bias": [[{2**63}, 1]]}}}}', '{"sampling": {"logit_bias": [[true, 1]]}}',
    ],
    "temperature must": [f'{{"sampling": {{"temperature": {10**400}}}}}', '{"sampling": {"temperature": -1}}'],
    "repetition_penalty must": [f'{{"sampling": {{"repetition_penalty": {10**400}}}}}'],
    "presence_penalty must": [f'{{"sampling": {{"presence_penalty": {10**400}}}}}'],
    "top_k must": [f'{{"sampling": {{"top_k": {10**30}}}}}', '{"sampling": {"top_k": 1.5}}'],
    "seed must": [f'{{"sampling": {{"seed": {10**30}}}}}'],
    "max_new_tokens must": [f'{{"max_new_tokens": {10**30}}}', '{"max_new_tokens": 1e3}'],
    "stop must be a list": ['{"stop": "end"}', '{"stop": {"end": 1}}', '{"stop": [3]}', '{"stop": null}'],
    "sampling must be an object": ['{"sampling": [["temperature", 1]]}', '{"sampling": null}'],
}  # fmt: skip


@pytest.mark.parametrize(("why", "options"), [(why, x) for why, texts in WRONG_OPTIONS.items() for x in texts])
def test_wrong_options_of_a_file_are_named_with_it(why: str, options: str, model: HybridLM, tmp_path: Path) -> None:
    talk = conversation(model)
    (tmp_path / "talk.json").write_text('{"messages": [], ' + options[1:])
    before = (talk.sampling, talk.max_new_tokens, talk.stop)
    with pytest.raises(ValueError, match=rf"talk\.json must have options as /save writes them, got others \({why}"):
        talk.resume(tmp_path / "talk.json")
    assert (talk.sampling, talk.max_new_tokens, talk.stop) == before


def test_options_of_a_file_are_those_that_were_saved(model: HybridLM, tmp_path: Path) -> None:
    sampling = Sampling(0.5, 3, seed=2**64 - 1, logit_bias=((1, 2.0),))
    talk = replace(conversation(model), sampling=sampling, stop=("end",))
    talk.save(tmp_path / "talk.json")
    other = conversation(model)
    other.resume(tmp_path / "talk.json")
    assert (other.sampling, other.max_new_tokens, other.stop) == (talk.sampling, talk.max_new_tokens, ("end",))


def test_a_template_that_refuses_takes_the_message_back(model: HybridLM) -> None:
    talk = conversation(model, OWN + "{{ raise_exception('no digits') if '1' in messages[-1].content }}")
    with pytest.raises(ValueError, match="no digits"):
        said(talk, "1")
    assert talk.messages == []
    assert said(talk, "one")


def test_a_file_that_the_template_refuses_replaces_nothing(model: HybridLM, tmp_path: Path) -> None:
    talk = conversation(model, OWN + "{{ raise_exception('no digits') if '1' in messages[-1].content }}")
    said(talk, "one")
    before = list(talk.messages)
    (tmp_path / "talk.json").write_text(json.dumps({"messages": [{"role": "user", "content": "1"}]}))
    with pytest.raises(ValueError, match="no digits"):
        talk.load(tmp_path / "talk.json")
    assert talk.messages == before
    assert said(talk, "two")
