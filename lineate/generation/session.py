"""The terminal side of `lineate chat`: typed lines, commands that begin with /, and streamed answers."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from lineate.console.names import nearest, user_path
from lineate.console.terminal import printable
from lineate.generation.chat import Conversation

FIRST = "main"
"""The name of the initial branch of a session."""
BEGIN_PASTE, END_PASTE = "\x1b[200~", "\x1b[201~"
"""The markers that a terminal sends around pasted text, if bracketed paste is enabled."""
PASTE = re.compile("|".join(map(re.escape, (BEGIN_PASTE, END_PASTE))))


@dataclass
class Session:
    """A conversation in a terminal, with branches.

    Args:
        talk: The conversation.
        raw: Whether control characters in answers are written unchanged, rather than as dots.
    """

    talk: Conversation
    raw: bool = False
    branch: str = FIRST
    others: dict[str, Conversation] = field(default_factory=dict)

    def run(self) -> None:
        """Read lines until the end of the input or /exit."""
        terminal = sys.stdin.isatty()
        asks = terminal and not _enable_editing() and sys.stdout.isatty()
        if terminal:
            self.note("type a message, or /help; Ctrl-C stops an answer, Ctrl-D leaves")
        if asks:
            print("\x1b[?2004h", end="", flush=True)  # readline does so by itself
        try:
            self._read(terminal)
        finally:
            if asks:
                print("\x1b[?2004l", end="", flush=True)

    def _read(self, terminal: bool) -> None:
        while True:
            try:
                line = _read_line("> " if terminal else "")
            except KeyboardInterrupt:
                self.note("\n/exit or Ctrl-D leaves")
                continue
            if line is None:
                break
            if not self.handle(line):
                break

    def handle(self, line: str) -> bool:
        """Execute one line; return whether the session continues.

        Args:
            line: A message, or a command that begins with /; // begins a message that begins with /.
        """
        if not line.strip():
            return True
        if not line.startswith("/") or line.startswith("//"):
            self.answer(line.removeprefix("/"))
            return True
        name, _, argument = line[1:].strip().partition(" ")
        if name in ("exit", "quit"):
            return False
        if name not in COMMANDS:
            self.note(f"no command /{name}{nearest(name, COMMANDS)}; /help lists them, and // begins a message with /")
            return True
        try:
            COMMANDS[name].run(self, argument.strip())
        except (ValueError, OSError) as error:
            self.note(str(error))
        return True

    def answer(self, text: str) -> None:
        """Send a message and print the answer; Ctrl-C ends the answer."""
        before, started = len(self.talk.messages), False
        pieces = self.talk.answer(text)
        try:
            for piece in pieces:
                piece = piece if started else piece.lstrip()
                started = started or bool(piece)
                sys.stdout.write(piece if self.raw else printable(piece))
                sys.stdout.flush()
        except KeyboardInterrupt:
            self.note("\nstopped")
        except (ValueError, OSError) as error:
            self.note(str(error))
        finally:
            pieces.close()  # type: ignore[attr-defined]
        if len(self.talk.messages) == before:
            return  # nothing was answered
        sys.stdout.write("\n")
        sys.stdout.flush()
        turn = self.talk.turn
        assert turn is not None
        rate = f", {turn.rate:.1f} tokens/s" if turn.rate else ""
        self.note(f"[{turn.read} tokens read, {turn.reused} kept; {turn.made} made{rate}]")

    def note(self, text: str) -> None:
        """Print a line that is not part of the conversation."""
        print(printable(text), file=sys.stderr, flush=True)

    def undo(self, argument: str) -> None:
        """Take back the last message and its answer."""
        text = self.talk.undo()
        self.note("there is nothing to take back" if text is None else f"took back: {text}")

    def fork(self, argument: str) -> None:
        """Continue as NAME from here; the conversation so far is kept. Without a name: list all of them."""
        if not argument:
            self.note(", ".join([f"{self.branch} (this one)", *self.others]))
            return
        if argument in (self.branch, *self.others):
            raise ValueError(f"there is a conversation {argument} already; /go {argument} goes on with it")
        self.others[self.branch] = self.talk
        self.branch, self.talk = argument, self.talk.copy()
        self.note(f"this is {argument} now; /go {next(reversed(self.others))} goes back")

    def go(self, argument: str) -> None:
        """Go on with the conversation NAME."""
        if argument not in self.others:
            raise ValueError(
                f"expected the name of another conversation{nearest(argument, self.others)}, got '{argument}'; "
                "/fork lists them"
            )
        self.others[self.branch] = self.talk
        self.branch, self.talk = argument, self.others.pop(argument)
        last = self.talk.messages[-1]["content"] if self.talk.messages else ""
        self.note(f"this is {argument} now{f', after: {last}' if last else ''}")

    def save(self, argument: str) -> None:
        """Write the conversation to FILE, as JSON; /save! replaces a file that is there."""
        self._save(argument, False)

    def replace(self, argument: str) -> None:
        """Write the conversation to FILE, as JSON, also over another file."""
        self._save(argument, True)

    def _save(self, argument: str, overwrite: bool) -> None:
        file = _file(argument)
        if file.is_file() and not overwrite:
            raise ValueError(f"there is a file '{file}' already; /save! {argument} replaces it")
        self.talk.save(file, overwrite)
        self.note(f"{len(self.talk.messages)} messages are in {file}")

    def resume(self, argument: str) -> None:
        """Go on with the conversation in FILE as if it had not ended: with its messages, seed and other options."""
        file = _file(argument)
        self.talk.resume(file)
        self.note(f"{len(self.talk.messages)} messages from {file}, with their options")

    def load(self, argument: str) -> None:
        """Go on from the messages in FILE; they are read with the next message."""
        file = _file(argument)
        self.talk.load(file)
        self.note(f"{len(self.talk.messages)} messages from {file}")

    def system(self, argument: str) -> None:
        """Tell the model TEXT before the conversation, which is read again; without a text: tell it nothing."""
        self.talk.system(argument)
        self.note("the system message is set" if argument else "there is no system message")

    def seed(self, argument: str) -> None:
        """Draw with the seed N from now on: after /undo, another answer to the same message."""
        if not argument.isdecimal():
            raise ValueError(f"expected a number of at least 0 after /seed, got '{argument}'")
        self.talk.sampling = replace(self.talk.sampling, seed=int(argument))

    def reset(self, argument: str) -> None:
        """Begin again, with the same system message."""
        self.talk.reset()
        self.note("a new conversation")

    def help(self, argument: str) -> None:
        """List the commands."""
        for name, command in COMMANDS.items():
            self.note(f"  {f'/{name} {command.argument}':15} {(command.run.__doc__ or '').strip()}")
        self.note("  /exit           Leave.")


@dataclass(frozen=True)
class Command:
    """A command that begins with /.

    Args:
        run: The method of Session; its docstring is the help.
        argument: The text after the name.
    """

    run: Callable[[Session, str], None]
    argument: str = ""


COMMANDS = {
    "undo": Command(Session.undo),
    "fork": Command(Session.fork, "NAME"),
    "go": Command(Session.go, "NAME"),
    "save": Command(Session.save, "FILE"),
    "save!": Command(Session.replace, "FILE"),
    "resume": Command(Session.resume, "FILE"),
    "load": Command(Session.load, "FILE"),
    "system": Command(Session.system, "TEXT"),
    "seed": Command(Session.seed, "N"),
    "reset": Command(Session.reset),
    "help": Command(Session.help),
}


def _file(name: str) -> Path:
    if not name:
        raise ValueError("expected the name of a file, got none; such as /save talk.json")
    return user_path(name)


def _read_line(prompt: str) -> str | None:
    """Return a line without its newline; None at the end of input.

    A backslash at the end joins the next line, and text that a terminal marks as pasted is one line.
    """
    lines: list[str] = []
    pasting = False
    while True:
        try:
            line = input("" if pasting else prompt)
        except EOFError:
            return "\n".join(lines) if lines else None
        goes_on = line.endswith("\\") and not pasting
        for mark in PASTE.findall(line):
            pasting = mark == BEGIN_PASTE
        line = PASTE.sub("", line)
        if not pasting and not goes_on:
            return "\n".join([*lines, line])
        lines.append(line if pasting else line[:-1])


def _enable_editing() -> bool:
    """Let arrow keys edit the line, where Python has readline; return whether it recognises pasted text."""
    try:
        import readline
    except ImportError:
        return False
    if "libedit" in (readline.__doc__ or ""):
        return False
    readline.parse_and_bind("set enable-bracketed-paste on")
    return True
