"""rendering: the process in which chat templates run: `python -m kvcellar.text.rendering SOCKET`. See `worker`.

A template is a program of the model, which may loop, or make a gigabyte of little. Its environment is that of
transformers, in jinja2's sandbox: blocks are trimmed; there are loop controls, `{% generation %}`, `raise_exception`,
`strftime_now`, and a `tojson` that does not escape HTML. The sandbox blocks access to Python's internals, and changes
of what a template is given. It does not limit time or memory: the process does.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from types import CodeType
from typing import Any

from jinja2 import Template, TemplateError, TemplateRuntimeError, meta, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Raw, Struct

from kvcellar.wire import decode
from kvcellar.worker import JobEnded, Worker, serve

_MOST_FORMAT = 1000  # characters of a format of `strftime_now`


class Refused(TemplateError):
    """The template rejected the messages by calling `raise_exception`."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one run of one template. `mark` is a character that `tojson` never escapes."""

    def __init__(self, mark: str = "") -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            optimized=False,
            finalize=_unchanged,
            cache_size=0,
        )
        self._mark = mark
        untyped: Any = self
        filters: dict[str, Callable[..., Any]] = untyped.filters
        filters["tojson"] = self._to_json
        del untyped.globals["lipsum"]
        untyped.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)

    def compiled(self, source: str) -> CodeType:
        """Code that `run` accepts. Raises jinja2's `TemplateError`s."""
        return self.compile(source, filename="chat template")

    def variables(self, source: str) -> frozenset[str]:
        """The variables that a template reads without having set them on every path."""
        reading = meta.TrackingCodeGenerator(self)
        reading.optimizer = None  # else it computes what is constant, such as 10**9 characters
        reading.visit(self.parse(source))
        return frozenset(reading.undeclared_identifiers)

    def run(self, code: CodeType, variables: Mapping[str, Any]) -> Iterator[str]:
        """Run compiled code once; yields the parts of its output."""
        return Template.from_code(self, code, self.make_globals(None)).generate(dict(variables))

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return text.replace(json.dumps(self._mark)[1:-1], self._mark) if self._mark and ensure_ascii else text


@pass_context
def _unchanged(_: Context, value: Any) -> Any:
    """What is printed. As it takes a context, jinja2 computes no constant expression where it compiles a template."""
    return value


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}`: marks assistant text for training. Only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 (a plain attribute in the base class)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


def _raise_exception(message: object) -> None:
    raise Refused(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > _MOST_FORMAT:
        raise TemplateRuntimeError(f"strftime_now has a format of {len(format)} characters; {_MOST_FORMAT} are allowed")
    return datetime.now().strftime(format)


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
