"""sandbox: runs an untrusted chat template with limits on CPU time and memory.

Jinja's own sandbox blocks access to Python internals, but limits neither CPU time nor memory. Here every loop iteration
and every call checks the CPU time, and the bytes of every value are limited. An operation that can make much of little
(`"a" * 10**9`, `center`, `replace`, `title`, which makes a list of all words, ...) is estimated before it is executed,
what it makes on the way included; where an operation takes about as much as its input, its result is counted
afterwards. An iterator counts what it makes as it is read. Otherwise the environment is that of transformers' chat
templates: trimmed blocks, loop controls, `{% generation %}`, `raise_exception`, `strftime_now`, and a `tojson` that
does not escape HTML.

Always true while a template runs:
  * no value that it created weighs more than `caps.value_bytes` (at every depth of nesting; an item that occurs twice
    counts twice), so printing or comparing a value takes a bounded time;
  * all values that it created take at most `caps.work_bytes` together, and what one operation takes on the way is at
    most a few times `caps.value_bytes`;
  * between two checks of the CPU time, which also pause the thread (`Pace`), it does at most one operation on such
    values.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from types import CodeType, MappingProxyType
from typing import Any, cast

from jinja2 import Template, TemplateError, TemplateRuntimeError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from kvcellar.text.meter import ITEM, PER_BIT, Caps, Meter, container, items_of, text_bytes


class Refused(TemplateError):
    """The template rejected the messages by calling `raise_exception`."""


class CappedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one run of one template. `mark` is a character that `tojson` never escapes."""

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
        """The variables that a template reads without having set them on every path."""
        return frozenset(meta.find_undeclared_variables(self.parse(source)))

    def run(self, code: CodeType, variables: Mapping[str, Any]) -> Iterator[str]:
        """Run compiled code once; yields the parts of its output."""
        template = Template.from_code(self, code, self.make_globals(None))
        for part in template.generate(dict(variables)):
            self.meter.tick()
            yield part

    # Called by the compiled code.

    def turn(self) -> None:
        """Called in each loop iteration. Empty, because `call` has checked the CPU time already."""

    def keep(self, value: Any) -> Any:
        """Called with each new list or dict, and each slice. `call` counts the returned value."""
        return value

    def joined(self, parts: tuple[Any, ...]) -> str:
        """`a ~ b ~ ...`; `call` counts the returned value."""
        self.meter.admit(sum(self._printed(part) for part in parts))
        return str_join(parts)

    def _printed(self, value: Any) -> int:
        """Bytes of a value as a string; a container is printed with its strings escaped."""
        return self.meter.weight(value) * (1 if container(value) is None else _ESCAPED)

    def concat(self, parts: Iterable[str]) -> str:  # type: ignore[override]
        """Join the output of a macro or a block into one value."""
        parts = list(parts)
        self.meter.admit(text_bytes(sum(map(len, parts)), *parts))
        return self.meter.made("".join(parts))

    def _print(self, value: Any) -> Any:
        """Count an expression that is printed, to the output or inside a macro or block."""
        if not isinstance(value, str):
            self.meter.admit(self._printed(value))
        return self.meter.made(value)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        self.meter.tick()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, type) and issubclass(owner, _PLAIN):
            raise SecurityError(f"{obj.__name__}() is not available to chat templates")
        if not isinstance(owner, _PLAIN):
            return self._counted(super().call(context, obj, *args, **kwargs))
        if obj.__name__ in _NOT_METHODS:
            raise SecurityError(f"{obj.__name__}() is not available to chat templates")
        args = self._foreseen(obj.__name__, owner, args, kwargs)
        return self._counted(super().call(context, obj, *args, **kwargs), owner)

    def _counted(self, result: Any, value: Any = None) -> Any:
        """What a function, or a method or filter of `value`, has returned, which is counted here or as it is read."""
        if isinstance(result, Iterator):
            return self.meter.iterated(cast("Iterator[object]", result))
        return self.meter.made(result, items=isinstance(value, str))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.meter.admit(_OPERATORS[operator](self.meter, left, right))
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
        """The filter with its result counted. Filters that take the context (or similar) have their value second."""
        at = 1 if getattr(filter_, "jinja_pass_arg", None) is not None else 0

        @functools.wraps(filter_)
        def capped(*args: Any, **kwargs: Any) -> Any:
            self.meter.tick()
            value: Any = args[at] if len(args) > at else None
            if len(args) > at:
                if container(value) is not None and name not in _OF_CONTAINERS:
                    self.meter.admit(self._printed(value))
                if name == "join":
                    self.meter.admit(_apart(self.meter, value, []) * 2)
                    value = list(value)  # an iterator can be read only once
                args = (*args[:at], value, *self._foreseen(name, value, args[at + 1 :], kwargs))
            return self._counted(filter_(*args, **kwargs), value)

        return capped

    def _foreseen(self, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """`args`, possibly copied. Raises if the result of method or filter `name` on `value` could be too large."""
        if name == "join" and isinstance(value, str) and args:
            args = (list(args[0]),)  # a method; its argument may be an iterator, which can be read only once
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
_NOT_METHODS = frozenset({"encode", "translate", "to_bytes", "striptags", "unescape"})  # unused, can be huge or slow
_NOT_FILTERS = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")  # the same
_ESCAPED = 4  # bytes of a printed container for a byte of its strings: "\\x00"
_MOST_FORMAT = 1000  # characters of a format of `strftime_now`
_OF_CONTAINERS = frozenset(  # filters that do not print a list or dict that they are given
    {
        *("attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "items", "join", "last", "length"),
        *("list", "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "sort"),
        *("sum", "tojson", "unique"),
    }
)


class _Metered(NodeTransformer):
    """Adds to a template's syntax tree the calls with which `CappedEnvironment` counts loops and new values."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("turn", []), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", [nodes.Tuple(node.nodes, "load", lineno=node.lineno)])

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _call("keep", [node]) if isinstance(node.arg, nodes.Slice) else node

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
    """`{% generation %}` ... `{% endgeneration %}`: marks assistant text for training. Only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 (a plain attribute in the base class)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


class _Namespace(Namespace):
    """`namespace(...)`. Its contents are not printed, because namespaces can be nested and cyclic."""

    def __repr__(self) -> str:
        return "<namespace>"


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict(...)` as a function, so that templates cannot use class methods such as `dict.update`."""
    return dict(*args, **kwargs)


def _raise_exception(message: object) -> None:
    raise Refused(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > _MOST_FORMAT:
        raise TemplateRuntimeError(f"strftime_now has a format of {len(format)} characters; {_MOST_FORMAT} are allowed")
    return datetime.now().strftime(format)


# Upper bounds of the bytes that an operation takes, computed from its input. All take (meter, value, arguments).


def _numbers(args: list[Any]) -> int:
    return max((abs(int(arg)) for arg in args if isinstance(arg, int | float)), default=0)


def _longest(args: list[Any]) -> int:
    return max((text_bytes(len(arg), arg) for arg in args if isinstance(arg, str)), default=0)


def _padded(meter: Meter, value: Any, args: list[Any]) -> int:
    return meter.weight(value) + text_bytes(_numbers(args), value, *args)


def _grouped(meter: Meter, value: Any, args: list[Any]) -> int:
    return _apart(meter, value, args) + ITEM * _numbers(args)


def _indented(meter: Meter, value: Any, args: list[Any]) -> int:
    lines = _lines(value) if isinstance(value, str) else 1
    return meter.weight(value) + lines * (ITEM + 4 * max(_numbers(args), _longest(args), 4))


def _untabbed(meter: Meter, value: Any, args: list[Any]) -> int:
    return meter.weight(value) + text_bytes(value.count("\t") * max(_numbers(args), 8), value)


def _replaced(meter: Meter, value: Any, args: list[Any]) -> int:
    if len(args) < 2 or not isinstance(args[0], str) or not isinstance(args[1], str):
        return meter.weight(value)
    if not isinstance(value, str):
        return meter.weight(value) * (1 + _longest(args))
    return text_bytes(len(value) + value.count(args[0]) * len(args[1]), value, args[1])


def _joined(meter: Meter, value: Any, args: list[Any]) -> int:
    """The filter joins `value` with its argument as separator; the method joins its argument (a list) with `value`."""
    if isinstance(value, str) and args and (items := container(args[0])) is not None:
        return meter.weight(items) * _ESCAPED + text_bytes(len(items) * len(value), value)
    return meter.weight(value) * _ESCAPED + len(container(value) or ()) * _longest(args)


def _as_json(meter: Meter, value: Any, args: list[Any]) -> int:
    given: list[Any] = []  # the separators are a pair
    for arg in args:
        given.extend((arg,) if (inside := container(arg)) is None else items_of(inside))
    return meter.weight(value) * (_ESCAPED + _numbers(given) + _longest(given))


def _escaped(meter: Meter, value: Any, _args: list[Any]) -> int:
    """`&#34;` for a quotation mark."""
    return meter.weight(value) + 4 * text_bytes(sum(map(value.count, "&<>'\"")), value) if isinstance(value, str) else 0


def _rounded(_meter: Meter, _value: Any, args: list[Any]) -> int:
    return _numbers(args) * PER_BIT * 4  # 10**precision


def _summed(_meter: Meter, _value: Any, args: list[Any]) -> int:
    """Only numbers may be summed: a sum of lists copies the first lists again for each further list."""
    return 0 if all(container(arg) is None for arg in args) else _FAR_TOO_LARGE


def _apart(meter: Meter, value: Any, _args: list[Any]) -> int:
    """Each character of a text becomes a value, or each item of a list a reference."""
    return ITEM * len(value) if isinstance(value, str) else meter.weight(value)


def _split(meter: Meter, value: Any, args: list[Any]) -> int:
    """A text at one that is given, or at whitespace."""
    separator = next((arg for arg in args if isinstance(arg, str)), None)
    parts = sum(map(value.count, WHITESPACE)) if separator is None else value.count(separator)
    return meter.weight(value) + ITEM * 2 * (1 + parts)


def _split_lines(meter: Meter, value: Any, _args: list[Any]) -> int:
    return meter.weight(value) + ITEM * 2 * _lines(value)


def _lines(text: str) -> int:
    return 1 + sum(map(text.count, _LINE_ENDS))


def _percent(meter: Meter, pattern: Any, given: Any) -> int:
    """`pattern % given`. Widths of four or more digits, and widths that are passed as values, are rejected."""
    if not isinstance(pattern, str):
        return 0
    if re.search(r"%(\([^)]{0,99}\))?[^a-zA-Z%(]*(\d{4}|\*)", pattern):
        return _FAR_TOO_LARGE
    return meter.weight(pattern) + pattern.count("%") * 4 * (1000 + meter.weight(given))


def _braces(meter: Meter, pattern: str, given: Any) -> int:
    """`pattern.format(...)`, with the same rule."""
    if re.search(r"\{[^{}]*(\d{4}|\{)", pattern):
        return _FAR_TOO_LARGE
    return meter.weight(pattern) + pattern.count("{") * 4 * (1000 + meter.weight(given))


def _multiplied(meter: Meter, left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return (left.bit_length() + right.bit_length()) * PER_BIT
    return max(meter.weight(left) * _numbers([right]), meter.weight(right) * _numbers([left]))


def _to_the_power(_meter: Meter, left: Any, right: Any) -> int:
    return left.bit_length() * max(right, 0) * PER_BIT if isinstance(left, int) and isinstance(right, int) else 0


def _added(meter: Meter, left: Any, right: Any) -> int:
    """Beside a text that counts as safe, another one is escaped."""
    safe = any(isinstance(side, str) and type(side) is not str for side in (left, right))  # jinja2's `Markup`
    return sum(_escaped(meter, side, []) if safe else meter.weight(side) for side in (left, right))


_FAR_TOO_LARGE = 2**62
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
WHITESPACE = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
_OPERATORS: Mapping[str, Callable[[Meter, Any, Any], int]] = MappingProxyType(
    {"+": _added, "*": _multiplied, "**": _to_the_power, "%": _percent}
)
_GROWTH: Mapping[str, Callable[[Meter, Any, list[Any]], int]] = MappingProxyType(
    {
        **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded),
        **dict.fromkeys(("batch", "slice"), _grouped),
        **dict.fromkeys(("dictsort", "groupby", "list", "map", "reject", "select", "sort", "title"), _apart),
        **dict.fromkeys(("rejectattr", "selectattr", "unique", "urlencode", "wordcount"), _apart),
        **dict.fromkeys(("e", "escape", "forceescape"), _escaped),
        **dict.fromkeys(("split", "rsplit"), _split),
        "expandtabs": _untabbed,
        "format": _percent,
        "indent": _indented,
        "join": _joined,
        "replace": _replaced,
        "round": _rounded,
        "splitlines": _split_lines,
        "sum": _summed,
        "tojson": _as_json,
    }
)
