"""The sampling defaults of a checkpoint behind OpenAI's own client: used, shown, overridden, switched off."""

import json
import shutil

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("llguidance")

import httpx
from typer.testing import CliRunner

from lineate.cli import build_app
from lineate.models import preset
from lineate.serving.arguments import ServeArguments, settings_of
from lineate.serving.building import application
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.live_server import live
from tests.support.small_models import random_model

CHECKPOINT = {"do_sample": True, "temperature": 0.4, "top_k": 7, "top_p": 0.9, "repetition_penalty": 1.3}
OTHERS = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, **OTHERS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "sea-lion"
    tokenizer = chat_tokenizer()
    random_model(preset("tiny", "GA", vocab_size=tokenizer.vocab_size)).save_pretrained(folder)
    tokenizer.save(folder)
    (folder / "generation_config.json").write_text(json.dumps(CHECKPOINT))
    return folder


class Served:
    """A client of a server with some options."""

    def __init__(self, server):
        self.url, self.client = server.url, server.client()

    def text(self, **options):
        own = {key: options.pop(key) for key in ("top_k", "min_p", "repetition_penalty") if key in options}
        made = self.client.completions.create(
            model="sea-lion", prompt="The sea", max_tokens=24, seed=3, extra_body=own, **options
        )
        return made.choices[0].text

    def chat(self, **options):
        made = self.client.chat.completions.create(
            model="sea-lion", messages=[{"role": "user", "content": "Hello"}], max_tokens=24, seed=3, **options
        )
        return made.choices[0].message.content


@pytest.fixture(scope="module")
def serve(folder):
    made = []

    def start(**options):
        asked = ServeArguments(str(folder), device="cpu", context=512, slots=2, **options)
        app, engine, model, tokenizer = application(asked, settings_of(asked))
        engine.start()
        context = live(engine, tokenizer, app.state.service.description)
        made.append((context, engine))
        return Served(context.__enter__())

    yield start
    for context, engine in made:
        context.__exit__(None, None, None)
        engine.stop(drain=False)


@pytest.fixture(scope="module")
def served(serve):
    return serve()


@pytest.fixture(scope="module")
def plain(serve):
    return serve(sampling_defaults="none")


EXPLICIT = {name: value for name, value in CHECKPOINT.items() if name != "do_sample"}


def test_requests_that_do_not_say_draw_as_the_checkpoint_says(served, plain):
    assert served.text() == plain.text(**EXPLICIT) != plain.text()
    assert served.chat() != plain.chat()
    assert served.text(**dict.fromkeys(("top_k", "min_p"))) == served.text()  # null is alike


def test_a_requests_own_fields_win_one_by_one(served, plain):
    assert served.text(temperature=2.0) == plain.text(**{**EXPLICIT, "temperature": 2.0}) != served.text()
    assert served.text(top_k=0) == plain.text(**{**EXPLICIT, "top_k": 0})
    assert served.text(top_k=-1) == served.text(top_k=0)  # all tokens
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    assert served.text(**neutral) == plain.text()


def test_they_are_shown(served, plain):
    expected = {**EXPLICIT, **OTHERS}
    assert served.client.models.retrieve("sea-lion").model_extra["sampling_defaults"] == expected
    assert served.client.models.list().data[0].model_extra["sampling_defaults"] == expected
    assert httpx.get(f"{served.url}/lineate/info").json()["sampling"] == expected
    assert httpx.get(f"{plain.url}/lineate/info").json()["sampling"] == NEUTRAL


def test_options_of_the_server_win(serve, plain):
    own = serve(temperature=2.0, top_k=0)
    assert own.text() == plain.text(**{**EXPLICIT, "temperature": 2.0, "top_k": 0})
    assert own.text(temperature=0.4, top_k=7) == plain.text(**EXPLICIT)
    alone = serve(sampling_defaults="none", temperature=0.0)
    assert alone.text() == plain.text(temperature=0.0)
    assert httpx.get(f"{alone.url}/lineate/info").json()["sampling"] == {**NEUTRAL, "temperature": 0.0}


# The commands


def lineate(*words, typed=""):
    done = CliRunner().invoke(build_app(), list(map(str, words)), input=typed)
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.cover
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_commands_use_and_say_them(command, folder, tmp_path):
    def run(place, *words):
        code, text, said = lineate(command, place, "--max-tokens", 24, "--seed", 1, *words, typed="Hello")
        assert code == 0, said
        return text, said

    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    (bare / "generation_config.json").unlink()
    flags = [word for name, value in EXPLICIT.items() for word in (f"--{name.replace('_', '-')}", value)]
    text, said = run(folder)
    assert text == run(bare, *flags)[0] != run(bare)[0]
    named = "temperature 0.4, top_k 7, top_p 0.9, repetition_penalty 1.3"
    assert f"[sampling of the checkpoint: {named}; --sampling-defaults none leaves it out]" in said
    text, said = run(folder, "--sampling-defaults", "none")
    assert text == run(bare)[0] and "checkpoint" not in said and "checkpoint" not in run(bare)[1]
    text, said = run(folder, "--temperature", 2)
    assert text == run(bare, *flags, "--temperature", 2)[0]
    assert "[sampling of the checkpoint: top_k 7, top_p 0.9, repetition_penalty 1.3;" in said


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_a_wrong_file_is_named_and_can_be_passed_over(command, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "wrong")
    (tmp_path / "wrong" / "generation_config.json").write_text('{"temperature": "hot"}')
    words = ["--port", 0] if command == "serve" else []
    code, _, said = lineate(command, tmp_path / "wrong", *words, typed="Hello")
    assert code == 2 and "generation_config.json: temperature must be a number from 0 to 100, got 'hot'" in said
    code, _, said = lineate(command, tmp_path / "wrong", "--sampling-defaults", "some", *words, typed="Hello")
    assert code == 2 and "--sampling-defaults must be checkpoint or none, got 'some'" in said
    if command != "serve":
        assert lineate(command, tmp_path / "wrong", "--sampling-defaults", "none", typed="Hello")[0] == 0


@pytest.mark.cover
def test_tokens_and_max_tokens_are_one_option(folder):
    words = ("generate", folder, "-p", "Hello", "--temperature", 0)
    made = [lineate(*words, flag, 5) for flag in ("--max-tokens", "--tokens", "--max_tokens")]
    assert len({text for _, text, _ in made}) == 1 and all("; 5 made" in said for _, _, said in made)
    assert lineate("chat", folder, "--max-tokens", 5, typed="Hello")[0] == 0
    code, _, said = lineate("serve", folder, "--tokens", 0)
    assert code == 2 and "--tokens" in said
