"""Code in fresh processes, forked from one that has imported torch and nothing of lineate.

Importing torch takes seconds, and a fork takes none; what a process imports, changes or warns of stays in it.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The child leaves the loop and runs its code at the top level, so that it ends as `python -c` would.
SERVER = """
import json, os, signal, sys, torch
for line in sys.stdin:
    code, environment, folder = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
signal.alarm(300)
for descriptor, name in enumerate((os.devnull, folder + "/out", folder + "/err")):
    os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), descriptor)
os.environ.clear()
os.environ.update(environment)
exec(code, {"__name__": "__main__"})
"""


@cache
def _server() -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdin=pipe, stdout=pipe, text=True)
    atexit.register(process.communicate)  # closes its input, at which it ends
    return process


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code with these environment variables besides those of the caller.

    The variables reach lineate and other modules imported later; torch has already read its own.
    """
    server = _server()
    assert server.stdin and server.stdout
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps([code, {**os.environ, **environment}, folder]), file=server.stdin, flush=True)
        answer = int(server.stdout.readline())
        out, err = (Path(folder, name).read_text() for name in ("out", "err"))
    return subprocess.CompletedProcess(code, answer, out, err)


def command(folder: Path, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command `lineate` with these words in a folder, as `python -m lineate.cli` does."""
    words = ("lineate", *map(str, words))
    code = f"import os, sys; os.chdir({str(folder)!r}); sys.path[:1] = ['', {str(ROOT)!r}]; sys.argv = {[*words]}\n"
    return run(code + "from lineate.cli import main; main()", **environment)
