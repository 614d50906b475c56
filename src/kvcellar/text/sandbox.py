"""sandbox: runs a chat template that somebody else wrote, with an end in sight.

Jinja's own sandbox keeps a template from reaching Python; nothing there keeps it from running for ever or from filling
memory. Here every way to go on (a turn of a loop, a call) checks the CPU time that was used, and every way to make
something large is counted: before it is made where a few characters ask for gigabytes (`"a" * 10**9`, `center`,
`replace`, ...), and afterwards where the result is about as large as what went in. In all else the environment is that
of transformers' chat templates: trimmed blocks, loop controls, `{% generation %}`, `raise_exception`, `strftime_now`, a
`tojson` that does not escape HTML.

Always true while a template runs:
  * no value that it made weighs more than `caps.value_chars` (characters and items, however deep they are nested,
    counted as often as they would be written out), so neither printing nor comparing one takes long;
  * all that it made together, by length, is at most `caps.work_chars`;
  * between two checks of the CPU time, at which it also rests (`Pace`), it does no more than one operation on such
    values.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from types import CodeType, MappingProxyType
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from kvcellar.text.meter import Caps, Meter, container, items_of


class Refused(TemplateError):
    """The template called `raise_exception`: it does not want these messages."""


class CappedEnvironment(ImmutableSandboxedEnvironment):
    """One run of one template. `mark` is a character that stands for itself in JSON, however it is escaped."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, caps: Caps, mark: str = "") -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=self._print,
            cache_size=0,
        )
        self.meter = Meter(caps)
        self._mark = mark
        untyped: Any = self
        filters: dict[str, Callable[..., Any]] = untyped.filters
        filters["tojson"] = self._to_json
        for name in _NOT_FILTERS:
            del filters[name]
        filters.update({name: self._capped(name, filter_) for name, filter_ in filters.items()})
        del untyped.globals["lipsum"]
        untyped.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_dict, namespace=_Namespace
        )

    def translated(self, source: str) -> CodeType:
        """Compile a template into code that `run` accepts. Raises jinja2's `TemplateError`s."""
        tree = _Metered().visit(self.parse(source))
        return self.compile(tree, filename="chat template")

    def variables(self, source: str) -> frozenset[str]:
        """The variables that a template reads and does not always set itself."""
        return frozenset(meta.find_undeclared_variables(self.parse(source)))

    def run(self, code: CodeType, variables: Mapping[str, Any]) -> Iterator[str]:
        """Run it once, part by part."""
        template = Template.from_code(self, code, self.make_globals(None))
        for part in template.generate(dict(variables)):
            self.meter.tick()
            yield part

    # What the compiled code calls.

    def turn(self) -> None:
        """A loop goes round; `call` has checked the CPU time already."""

    def keep(self, value: Any) -> Any:
        """A list, a dict or a joined string was made; `call` counts it."""
        return value

    def concat(self, parts: Iterable[str]) -> str:  # type: ignore[override]
        """The output of a macro or a block becomes a value."""
        parts = list(parts)
        self.meter.admit(sum(map(len, parts)))
        return "".join(parts)

    def _print(self, value: Any) -> Any:
        """An expression is written to the output, or to what becomes a value later."""
        if not isinstance(value, str):
            self.meter.admit(self.meter.weight(value))
        return self.meter.made(value)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        self.meter.tick()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, _PLAIN):
            if obj.__name__ in _NOT_METHODS:
                raise SecurityError(f"{obj.__name__}() is not available to chat templates")
            args = self._foreseen(obj.__name__, owner, args, kwargs)
        return self.meter.made(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            self.meter.admit(_multiplied(self.meter, left, right))
        elif operator == "**":
            self.meter.admit(_to_the_power(left, right))
        elif operator == "%":
            self.meter.admit(_percent(self.meter, left, right))
        result = super().call_binop(context, operator, left, right)
        return self.meter.added(left, right, result) if operator == "+" else self.meter.made(result)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def capped(*args: Any, **kwargs: Any) -> str:
            self.meter.admit(_braces(self.meter, value.__self__, [*args, *kwargs.values()]))
            return wrapped(*args, **kwargs)

        return capped

    def _capped(self, name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
        """The filter, counted. Those that want the context or the like get it first, and their value second."""
        at = 1 if getattr(filter_, "jinja_pass_arg", None) is not None else 0

        @functools.wraps(filter_)
        def capped(*args: Any, **kwargs: Any) -> Any:
            self.meter.tick()
            if len(args) > at:
                value = list(args[at]) if name == "join" else args[at]
                args = (*args[:at], value, *self._foreseen(name, value, args[at + 1 :], kwargs))
            return self.meter.made(filter_(*args, **kwargs))

        return capped

    def _foreseen(self, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """`args`, if what method or filter `name` makes of `value` is small enough."""
        if name == "join" and isinstance(value, str) and args:
            args = (list(args[0]),)  # a method, and what it joins may be there only once
        if (growth := _GROWTH.get(name)) is not None:
            self.meter.admit(growth(self.meter, value, [*args, *kwargs.values()]))
        return args

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


_PLAIN = (str, bytes, int, float, list, tuple, dict)
_NOT_METHODS = frozenset({"encode", "translate", "maketrans", "to_bytes", "from_bytes"})  # none is of use, all can grow
_NOT_FILTERS = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")  # nor are these
_PER_BIT = 2**9  # whole numbers may have 2**16 bits: Python needs time for more


class _Metered(NodeTransformer):
    """Adds to a template's tree the calls that `CappedEnvironment` counts by."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("turn", []), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("keep", [node])

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return node if all(isinstance(item, nodes.Const) for item in node.items) else _call("keep", [node])

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _call("keep", [node])

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        fixed = node.ctx != "load" or all(isinstance(item, nodes.Const | nodes.Slice) for item in node.items)
        return node if fixed else _call("keep", [node])


def _call(name: str, args: list[nodes.Expr]) -> nodes.Call:
    lineno = args[0].lineno if args else 0
    return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None, lineno=lineno)


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}`: marks the assistant's words for training; here only its body."""

    tags = {"generation"}  # noqa: RUF012 (so in the class it extends)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


class _Namespace(Namespace):
    """`namespace(...)`, which does not print what it holds: it may hold others, and those it again."""

    def __repr__(self) -> str:
        return "<namespace>"


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict(...)` without the methods of the class, some of which change what they are given."""
    return dict(*args, **kwargs)


def _raise_exception(message: object) -> None:
    raise Refused(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


# How large a result can be, foreseen from what goes in. All take (meter, value, arguments).


def _numbers(args: list[Any]) -> int:
    return max((abs(int(arg)) for arg in args if isinstance(arg, int | float)), default=0)


def _longest(args: list[Any]) -> int:
    return max((len(arg) for arg in args if isinstance(arg, str)), default=0)


def _padded(meter: Meter, value: Any, args: list[Any]) -> int:
    return meter.weight(value) + _numbers(args)


def _indented(meter: Meter, value: Any, args: list[Any]) -> int:
    lines = value.count("\n") + 1 if isinstance(value, str) else 1
    return meter.weight(value) + lines * max(_numbers(args), _longest(args), 4)


def _untabbed(meter: Meter, value: Any, args: list[Any]) -> int:
    return meter.weight(value) + value.count("\t") * max(_numbers(args), 8)


def _replaced(meter: Meter, value: Any, args: list[Any]) -> int:
    if len(args) < 2 or not isinstance(args[0], str) or not isinstance(args[1], str):
        return meter.weight(value)
    found = value.count(args[0]) if isinstance(value, str) else meter.weight(value)
    return meter.weight(value) + found * len(args[1])


def _joined(meter: Meter, value: Any, args: list[Any]) -> int:
    """A filter joins `value` with an argument, a method joins its first argument (a list by now) with `value`."""
    items = container(args[0]) if isinstance(value, str) and args else None
    if items is not None:
        return meter.weight(items) + len(items) * len(value)
    return meter.weight(value) + len(value) * _longest(args)


def _as_json(meter: Meter, value: Any, args: list[Any]) -> int:
    given: list[Any] = []  # the separators are a pair
    for arg in args:
        given.extend((arg,) if (inside := container(arg)) is None else items_of(inside))
    return meter.weight(value) * (1 + _numbers(given) + _longest(given))


def _rounded(_meter: Meter, _value: Any, args: list[Any]) -> int:
    return _numbers(args) * _PER_BIT * 4  # 10**precision


def _summed(_meter: Meter, _value: Any, args: list[Any]) -> int:
    """Numbers only: a sum of lists copies the first ones over and over."""
    return 0 if all(container(arg) is None for arg in args) else _FAR_TOO_LARGE


def _percent(meter: Meter, pattern: Any, given: Any) -> int:
    """`pattern % given`: widths of four digits, or such that come with the values, are nobody's need."""
    if not isinstance(pattern, str):
        return 0
    if re.search(r"%(\([^)]{0,99}\))?[^a-zA-Z%(]*(\d{4}|\*)", pattern):
        return _FAR_TOO_LARGE
    return len(pattern) + pattern.count("%") * (1000 + meter.weight(given))


def _braces(meter: Meter, pattern: str, given: Any) -> int:
    """`pattern.format(...)`, likewise."""
    if re.search(r"\{[^{}]*(\d{4}|\{)", pattern):
        return _FAR_TOO_LARGE
    return len(pattern) + pattern.count("{") * (1000 + meter.weight(given))


def _multiplied(meter: Meter, left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return (left.bit_length() + right.bit_length()) * _PER_BIT
    return max(meter.weight(left) * _numbers([right]), meter.weight(right) * _numbers([left]))


def _to_the_power(left: Any, right: Any) -> int:
    return left.bit_length() * max(right, 0) * _PER_BIT if isinstance(left, int) and isinstance(right, int) else 0


_FAR_TOO_LARGE = 2**62
_GROWTH: Mapping[str, Callable[[Meter, Any, list[Any]], int]] = MappingProxyType(
    {
        **dict.fromkeys(("center", "ljust", "rjust", "zfill", "batch", "slice"), _padded),
        "expandtabs": _untabbed,
        "format": _percent,
        "indent": _indented,
        "join": _joined,
        "replace": _replaced,
        "round": _rounded,
        "sum": _summed,
        "tojson": _as_json,
    }
)
