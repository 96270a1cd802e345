"""`lineate generate` and `lineate chat` as they are typed, over pipes."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("typer")
pytest.importorskip("jinja2")

from typer.testing import CliRunner, Result

from lineate.cli import build_app
from lineate.generation import builtin
from lineate.generation.command import run_generate
from lineate.generation.defaults import SamplingFlags
from lineate.models import HybridLM, preset
from lineate.text import Bytes, make_tokenizer

RATE = r"\[\d+ tokens read in [\d.]+ s; (\d+) made(, [\d.]+ tokens/s)?\]\n"


def lineate(*words: object, typed: str = "") -> Result:
    return CliRunner().invoke(build_app(), list(map(str, words)), input=typed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model that says letters."""
    place = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = HybridLM(replace(preset("tiny", pattern="GA", vocab_size=257), tie_embeddings=False))
    with torch.no_grad():
        model.head.weight[97:123] *= 15  # type: ignore[union-attr]
    model.save_pretrained(place)
    Bytes().save(place)
    return place


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder as others publish them: tokenizer.json, its configuration, and a dtype of 16 bit."""
    pytest.importorskip("tokenizers")
    place = tmp_path_factory.mktemp("published")
    tokenizer = make_tokenizer("bpe:280", ["the cat and the hat and the bat sat on the mat, and that was that"] * 3)
    tokenizer.save(place)
    (place / "tokenizer_kind.json").unlink()
    (place / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|endoftext|>",
                "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
                "{% if add_generation_prompt %}assistant: {% endif %}",
            }
        )
    )
    torch.manual_seed(0)
    HybridLM(preset("tiny", pattern="GA", vocab_size=320)).bfloat16().save_pretrained(place)
    return place


# generate


@pytest.mark.cover
def test_generate(folder: Path) -> None:
    words = ("generate", folder, "--tokens", 20, "--seed", 5)
    done = lineate(*words, "-p", "abc")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("abc") and done.stdout.endswith("\n")
    assert (found := re.fullmatch(RATE, done.stderr)) and int(found[1]) <= 20
    assert lineate(*words, "--prompt", "abc").stdout == done.stdout
    assert lineate(*words, typed="abc\n").stdout == done.stdout  # a pipe
    assert lineate(*words, "-p", "-", typed="abc").stdout == done.stdout
    assert lineate(*words, "-p", "abc", "--seed", 6).stdout != done.stdout
    greedy = [lineate(*words, "-p", "abc", "--seed", n, "--temperature", 0).stdout for n in (1, 2)]
    assert greedy[0] == greedy[1]
    for option in (["--top-k", 1], ["--top-p", 1e-9], ["--min-p", 1]):
        assert lineate(*words, "-p", "abc", *option).stdout == greedy[0], option
    varied = lineate(*words, "-p", "abc", "--temperature", 0, "--repetition-penalty", 50).stdout
    assert len(set(varied)) > len(set(greedy[0]))


def test_generate_stops_before_a_text(folder: Path) -> None:
    whole = lineate("generate", folder, "--tokens", 20, "-p", "abc").stdout.removeprefix("abc")
    stop = whole[4:6]
    done = lineate("generate", folder, "--tokens", 20, "-p", "abc", "--stop", "never said", "--stop", stop)
    assert done.stdout == f"abc{whole[: whole.index(stop)]}\n"


@pytest.mark.cover
def test_generate_with_a_published_tokenizer(published: Path) -> None:
    done = lineate("generate", published, "-p", "the cat", "--tokens", 9)
    assert done.exit_code == 0 and done.stdout.startswith("the cat"), done.output
    other = lineate("generate", published, "-p", "the cat", "--tokens", 9, "--dtype", "float32")
    assert other.exit_code == 0


@pytest.mark.cover
def test_dtypes_and_wrong_options(folder: Path) -> None:
    assert lineate("generate", folder, "--tokens", 2, "--dtype", "bf16").exit_code == 0
    for words, message in (
        (["--dtype", "int3"], "dtype must be one of auto, "),
        (["--device", "tpu"], "device must be auto, cpu or cuda, got 'tpu'"),
        (["--min-p", "2"], "min_p must be at least 0 and at most 1, got 2.0"),
        (["--repetition-penalty", "0"], "repetition_penalty must be above 0 and finite, got 0.0"),
        (["--stop", ""], "stop strings must have at least one character, got ''"),
    ):
        for command in ("generate", "chat"):
            done = lineate(command, folder, *words, typed="hello\n/exit\n")
            if (command, words[0]) == ("chat", "--stop"):
                assert message in done.stderr  # said when it is used
                continue
            assert done.exit_code == 2 and done.stdout == "", done.output
            assert done.stderr.startswith("lineate: ") and message in done.stderr


def test_a_tokenizer_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    HybridLM(preset("tiny", vocab_size=256)).save_pretrained(tmp_path)
    Bytes().save(tmp_path)
    done = lineate("generate", tmp_path)
    assert done.exit_code == 2 and "has 257 tokens and its model a vocabulary of 256" in done.stderr


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    HybridLM(preset("tiny", vocab_size=257)).save_pretrained(tmp_path / "model")
    with pytest.raises(FileNotFoundError, match=r"tokenizer_kind\.json is missing"):
        run_generate(tmp_path / "model", "def ", SamplingFlags({"temperature": 0}), 2)
    Bytes().save(tmp_path / "model")
    for folder in (tmp_path, tmp_path / "model"):  # a run has its model there
        run_generate(folder, "def ", SamplingFlags({"temperature": 0}), 2)


# chat


def talk(folder: Path, *lines: str, options: tuple[object, ...] = ()) -> tuple[list[str], list[str]]:
    """Return the answers and the notes of a conversation."""
    done = lineate("chat", folder, "--tokens", 8, *options, typed="".join(f"{line}\n" for line in lines))
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines(), done.stderr.splitlines()


@pytest.mark.parametrize("kind", ["own", "published"])
def test_chat(kind: str, folder: Path, published: Path) -> None:
    answers, notes = talk(folder if kind == "own" else published, "hello", "", "and then?", options=("--seed", 3))
    counts = [[int(n) for n in re.findall(r"\d+", note)[:3]] for note in notes]
    assert all(re.fullmatch(r"\[\d+ tokens read, \d+ kept; \d+ made(, [\d.]+ tokens/s)?\]", note) for note in notes)
    assert len(counts) == 2 and counts[0][1] == 0 and counts[1][1] > 0
    assert kind == "published" or len(answers) >= 2


@pytest.mark.cover
def test_undo_says_the_same_again(folder: Path) -> None:
    answers, notes = talk(folder, "hello", "again", "/undo", "again", "/exit", "never")
    assert len(answers) == 3 and answers[1] == answers[2] and "took back: again" in notes
    assert talk(folder, "/undo")[1] == ["there is nothing to take back"]
    answers, _ = talk(folder, "hello", "/undo", "/seed 7", "hello")
    assert answers[0] != answers[1]


@pytest.mark.cover
def test_branches(folder: Path) -> None:
    answers, notes = talk(
        folder, "hello", "/fork other", "one", "/go main", "one", "/go other", "two", "/fork", "/fork main", "/go x"
    )
    assert len(answers) == 4 and answers[1] == answers[2]
    kept = [int(re.findall(r"\d+", note)[1]) for note in notes if note.startswith("[")]
    assert kept[0] == 0 < kept[1] == kept[2] < kept[3]
    assert "other (this one), main" in notes
    assert any("there is a conversation main already; /go main goes on with it" in note for note in notes)
    assert any("expected the name of another conversation, got 'x'" in note for note in notes)


def test_files_of_conversations(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    answers, notes = talk(folder, "hello", f"/save {file}", "one")
    assert f"2 messages are in {file}" in notes
    messages = json.loads(file.read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    again, notes = talk(folder, f"/load {file}", "one")
    assert again == answers[1:] and f"2 messages from {file}" in notes
    _, notes = talk(folder, "/load", f"/load {tmp_path / 'none'}", f"/save {tmp_path}")
    assert notes[0] == "expected the name of a file, got none; such as /save talk.json"
    assert "No such file" in notes[1] and "expected a file that can be written" in notes[2]


@pytest.mark.cover
def test_save_replaces_no_file_unasked(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_text("mine")
    _, notes = talk(folder, "hello", f"/save {file}")
    assert f"there is a file '{file}' already; /save! {file} replaces it" in notes and file.read_text() == "mine"
    _, notes = talk(folder, "hello", f"/save! {file}")
    assert f"2 messages are in {file}" in notes and len(json.loads(file.read_text())["messages"]) == 2
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.cover
def test_a_conversation_is_resumed(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    answers, _ = talk(folder, "/system Be brief.", "/seed 5", "hello", f"/save {file}", "one", "two")
    for words, typed in ((["--resume", file], ""), ([], f"/resume {file}\n")):
        result = lineate("chat", folder, *words, typed=f"{typed}one\ntwo\n")
        assert result.exit_code == 0 and result.stdout.splitlines() == answers[1:]
    result = lineate("chat", folder, "--resume", tmp_path / "none")
    assert result.exit_code == 2 and "No such file" in result.stderr
    kept = json.loads(file.read_text())
    for options in (
        {"sampling": {"warmth": 1}},
        {"sampling": {"temperature": -1}},
        {"stop": [""]},
        {"max_new_tokens": 0},
    ):
        file.write_text(json.dumps({**kept, **options}))
        result = lineate("chat", folder, "--resume", file)
        assert result.exit_code == 2 and "must have options as /save writes them" in result.stderr


def test_what_is_loaded_has_a_limit(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "large.json"
    with file.open("wb") as stream:
        stream.truncate(2**34)
    for command in ("/load", "/resume"):
        _, notes = talk(folder, f"{command} {file}")
        assert f"{file} must have at most 16,777,216 bytes, got more" in notes[0]
    _, notes = talk(folder, "/load /dev/zero")
    assert "must have at most" in notes[0]


PASTED = "first\nsecond \\\n\n/exit\nlast"


def test_what_is_pasted_is_one_message(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    talk(folder, f"before \x1b[200~{PASTED}\x1b[201~ after", f"/save {file}")
    messages = json.loads(file.read_text())["messages"]
    assert [x["content"] for x in messages if x["role"] == "user"] == [f"before {PASTED} after"]


@pytest.mark.cover
@pytest.mark.parametrize("editor", ["readline", "none"])
def test_what_is_pasted_into_a_terminal(editor: str, folder: Path, tmp_path: Path) -> None:
    """With a line editor, which handles the marks itself, and without one, where the terminal is asked for them."""
    file = tmp_path / "talk.json"
    without = "" if editor == "readline" else "sys.modules['readline'] = None; "
    program = f"import sys; {without}from lineate.cli import main; main()"
    main, side = pty.openpty()
    words = [sys.executable, "-c", program, "chat", str(folder), "--tokens", "2"]
    process = subprocess.Popen(words, stdin=side, stdout=side, stderr=side, env={**os.environ, "TERM": "xterm"})
    os.close(side)
    shown = b""

    def wait_for(text: bytes) -> None:
        nonlocal shown
        while text not in shown:
            shown += os.read(main, 4096)
        shown = shown.split(text, 1)[1]

    try:
        wait_for(b"\x1b[?2004h")
        os.write(main, f"\x1b[200~{PASTED}\x1b[201~\n".encode())
        wait_for(b"made")
        os.write(main, f"/save {file}\n/exit\n".encode())
        wait_for(b"2 messages are in")
        with suppress(OSError):  # the terminal is gone
            while os.read(main, 4096):
                pass
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(main)
    assert json.loads(file.read_text())["messages"][0]["content"] == PASTED


@pytest.mark.cover
def test_system_messages_and_resets(folder: Path) -> None:
    plain, _ = talk(folder, "hello")
    told, _ = talk(folder, "/system be brief", "hello")
    assert told != plain
    assert talk(folder, "hello", options=("--system", "be brief"))[0] == told
    answers, _ = talk(folder, "one", "/reset", "hello", "/system be brief", "/reset", "hello")
    assert answers[1:] == plain + told


def test_help_and_unknown_commands(folder: Path) -> None:
    answers, notes = talk(folder, "/help", "/udno", "//slash")
    shown = "\n".join(notes)
    for name in ("/undo", "/fork NAME", "/save FILE", "/load FILE", "/system TEXT", "/reset", "/help", "/exit"):
        assert name in shown
    assert "no command /udno; did you mean 'undo'?" in shown
    assert len(answers) == 1  # a message that begins with one slash


def test_lines_that_go_on(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    talk(folder, "one\\", "two", f"/save {file}")
    assert json.loads(file.read_text())["messages"][0]["content"] == "one\ntwo"


def test_chat_with_what_is_no_model(tmp_path: Path) -> None:
    done = lineate("chat", tmp_path / "none", typed="hello\n")
    assert done.exit_code == 2 and done.stderr.startswith("lineate: expected the folder of a run or of a model")


@pytest.mark.cover
@pytest.mark.skipif(sys.platform == "win32", reason="signals of another kind")
def test_control_c_stops_an_answer_and_not_the_program(folder: Path, tmp_path: Path) -> None:
    # A shell may start programs with this signal ignored.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from lineate.cli import main; main()"
    )
    words = [sys.executable, "-c", program, "chat", str(folder), "--tokens", "100000000", "--temperature", "0"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # Bytes without a buffer: communicate() would not return what a text stream has read ahead.
    with subprocess.Popen(words, bufsize=0, **pipes) as process:  # type: ignore[call-overload]
        try:
            process.stdin.write(b"hello\n")
            begun = process.stdout.read(3)
            assert begun  # the answer has begun
            process.send_signal(signal.SIGINT)
            process.stdin.write(f"/save {tmp_path / 'talk.json'}\n/exit\n".encode())
            out, notes = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, notes
    assert b"stopped" in notes and b"2 messages are in" in notes
    saved = json.loads((tmp_path / "talk.json").read_text())["messages"][1]["content"]
    assert saved.strip() == (begun + out).decode().strip()


# the built-in model


@pytest.mark.cover
def test_the_builtin_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINEATE_CACHE", str(tmp_path))
    monkeypatch.setattr(builtin, "STEPS", 3)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    said: list[str] = []
    model, tokenizer = builtin.builtin_model(said.append)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert len(said) == 1 and said[0].startswith("training the built-in model") and not model.training
    assert tokenizer.end in model.end_tokens
    again, _ = builtin.builtin_model(said.append)
    assert len(said) == 1  # it was kept
    for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    trained = builtin.train_builtin(3)  # the same bits, as nothing is drawn from elsewhere
    for a, b in zip(model.state_dict().values(), trained.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    done = lineate("chat", "--tokens", 5, typed="hello\n")
    assert done.exit_code == 0 and "training" not in done.stderr and "tokens read" in done.stderr
    assert [path.name for path in (tmp_path / "builtin").iterdir()] == [builtin.builtin_folder().name]
    weights = builtin.builtin_folder() / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    builtin.builtin_model(said.append)
    assert "is damaged and is trained again" in said[1] and said[2].startswith("training")
    monkeypatch.setattr("lineate.__version__", "99.0")
    builtin.builtin_model(said.append)
    assert said[3].startswith("training") and len(list((tmp_path / "builtin").iterdir())) == 2


def test_a_builtin_model_that_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "STEPS", 1)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LINEATE_CACHE", str(tmp_path / "file"))
    said: list[str] = []
    model, _ = builtin.builtin_model(said.append)
    assert isinstance(model, HybridLM) and "cannot be kept" in said[-1]


@pytest.mark.cover
def test_the_built_in_model_learns_both_of_its_texts() -> None:
    generator = torch.Generator("cpu").manual_seed(0)
    texts = builtin.source_code(), builtin.conversations(generator)
    losses = []
    for steps in (0, 4):
        model = builtin.train_builtin(steps)
        losses.append([float(model(text[None, :257], labels=text[None, :257]).loss) for text in texts])
    assert all(after < before - 0.2 for before, after in zip(*losses, strict=True))


@pytest.mark.slow
def test_the_builtin_model_says_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the words it makes, most are those of Python's documentation."""
    monkeypatch.setenv("LINEATE_CACHE", str(tmp_path))
    done = lineate("chat", "--tokens", 200, typed="What about lists?\nWhat about classes?\nWhat about names?\n")
    words = re.findall(r"[a-z]{3,}", done.stdout.lower())
    known = set(re.findall(r"[a-z]+", " ".join(sentence for _, sentence in builtin.sentences()).lower()))
    assert len(words) > 20 and sum(word in known for word in words) > 0.6 * len(words)
