"""sandbox: the environment of chat templates: that of transformers, in jinja2's sandbox.

Blocks are trimmed; there are loop controls, `{% generation %}`, `raise_exception`, `strftime_now`, and a `tojson` that
does not escape HTML. The sandbox blocks access to Python's internals, and changes of what a template is given. It does
not limit time or memory: a template runs in a process that does (`rendering`).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from types import CodeType
from typing import Any

from jinja2 import Template, TemplateError, TemplateRuntimeError, meta, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

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
