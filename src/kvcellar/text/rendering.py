"""rendering: the process in which chat templates run: `python -m kvcellar.text.rendering SOCKET`. See `worker`.

A template is a program of the model, which may loop, or make a gigabyte of little.
"""

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import CodeType
from typing import Any

from jinja2 import TemplateError
from msgspec import Raw, Struct

from kvcellar.text.sandbox import ChatEnvironment, Refused
from kvcellar.wire import decode
from kvcellar.worker import JobEnded, Worker, serve

MEMORY, STACK = 2**29, 2**24  # bytes
KEPT = 8  # compiled templates

# Exceptions that a faulty template can raise. All others are defects of kvcellar, and `MemoryError` ends the process.
FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,  # includes RecursionError
    TemplateError,
    TypeError,
    ValueError,
)


class Render(Struct, frozen=True, array_like=True):
    """`variables` are JSON, so that integers may be of any size."""

    source: str
    variables: str
    mark: str  # a character that `tojson` does not escape
    most: int  # characters of the result


class Outcome(Struct, frozen=True, array_like=True):
    """`fault` is the name of an exception, and `text` what it says; or it is "", and `text` what was written."""

    text: str
    fault: str = ""


OVER = "Over"  # the fault of a template that writes too much


class Renderer:
    """Runs templates. Safe to use from several threads: each has a process of its own at a time."""

    def __init__(self) -> None:
        self._worker = Worker("kvcellar.text.rendering", lambda: None, again=True)

    def rest(self) -> None:
        """End the processes. The next run starts others."""
        self._worker.rest()

    def run(self, source: str, variables: Mapping[str, Any], mark: str, *, seconds: float, most: int) -> Outcome:
        """What a template writes."""
        try:
            return decode(self._worker.run(Render(source, json.dumps(variables), mark, most), seconds), Outcome)
        except JobEnded as ended:
            why = f"ran for more than {seconds:g} seconds" if ended.late else "needed too much memory or stack"
            return Outcome(why, OVER)


def opened(_: None) -> Callable[[Raw], Outcome]:
    @lru_cache(KEPT)
    def compiled(source: str) -> CodeType:
        return ChatEnvironment().compiled(source)

    def rendered(what: Raw) -> Outcome:
        job: Render = decode(what, Render)
        try:
            return Outcome(_written(job, compiled(job.source)))
        except FAULTS as error:
            reason = str(error)[: job.most].encode(errors="backslashreplace").decode()
            return Outcome(reason, Refused.__name__ if isinstance(error, Refused) else type(error).__name__)
        except _OverError as error:
            return Outcome(str(error), OVER)

    return rendered


class _OverError(Exception):
    pass


def _written(job: Render, code: CodeType) -> str:
    parts: list[str] = []
    size = 0
    for part in ChatEnvironment(job.mark).run(code, json.loads(job.variables)):
        parts.append(part)
        size += len(part)
        if size > job.most:
            raise _OverError(f"wrote more than {job.most} characters")
    text = "".join(parts)
    text.encode()  # raises for half of a surrogate pair
    return text


if __name__ == "__main__":
    serve(None, opened, stack=STACK, memory=MEMORY)
