"""A process in which kernels are lowered as for a GPU (fake_gpu.py), since this one may run Triton's interpreter."""

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

WAIT = "from tests.support.lowering import serve; serve()"


class Launched(NamedTuple):
    """The kernels that a call has launched."""

    launched: list[str]
    """The kernels, in order."""
    failures: list[str]
    """The compiler's messages."""
    links: list[int]
    """LINK of each launch."""
    beside: list[str]
    """The kernels with marks, by which scores are made beside a walk."""
    variants: list[str]
    """What was compiled for each launch, with all that selects it."""


class Lowering:
    """The process, as the tests see it; errors: a file that takes what it prints."""

    def __init__(self, errors: BinaryIO) -> None:
        self.errors = errors
        self.process = self._start()

    def _start(self) -> "subprocess.Popen[str]":
        environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, "-c", WAIT], stdin=pipe, stdout=pipe, stderr=self.errors, text=True, env=environment
        )

    def run(
        self, capability: int, call: str, options: dict[str, Any], passes: bool = False, lowers: bool = True
    ) -> Launched:
        """Make a call of lowered_calls.py on a GPU of this capability.

        Args:
            capability: 90 or 80.
            call: Its name.
            options: Its arguments.
            passes: Whether Triton's passes run, too.
            lowers: Whether kernels are lowered at all.
        """
        assert self.process.stdin and self.process.stdout
        before = self.errors.seek(0, os.SEEK_END)
        print(json.dumps([capability, call, options, passes, lowers]), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        found = json.loads(answer) if answer else ([], ["the compiler has ended the process"], [], [], [])
        launched, failures, links, beside, variants = found
        if failures:
            self.errors.seek(before)
            failures.append(self.errors.read().decode(errors="replace")[-4000:])
        if not answer:
            self.process.communicate()
            self.process = self._start()
        return Launched(launched, failures, links, beside, variants)


@contextmanager
def lowering() -> Iterator[Lowering]:
    """Start the process, and end it."""
    with tempfile.TemporaryFile() as errors:
        started = Lowering(errors)
        try:
            yield started
        finally:
            started.process.communicate()  # closes its input, at which it ends


def serve() -> None:
    """Make the calls that the tests ask for, in the process of their own."""
    from tests.support import fake_gpu

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    gpus = fake_gpu.install()
    from tests.support.lowered_calls import CALLS

    for line in sys.stdin:
        capability, call, options, gpus.passes, lowers = json.loads(line)
        if lowers != gpus.lowers:
            gpus.lowers = lowers
            gpus.forget()
        gpus.current = fake_gpu.CAPABILITIES.index(capability)
        gpus.launched, gpus.failures, gpus.links, gpus.beside, gpus.variants = [], [], [], [], []
        try:
            CALLS[call](**options)
        except Exception:
            gpus.failures.append(traceback.format_exc())
        answer = gpus.launched, gpus.failures, gpus.links, gpus.beside, gpus.variants
        print(json.dumps(answer), file=answers, flush=True)
