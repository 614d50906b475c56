"""sizes: symbolic sizes of torch as the expressions of a program."""

from collections.abc import Mapping
from typing import Any

from kvcellar.errors import KvcellarError
from kvcellar.kernels.program import Size

_CALLS = {"Max": "Max", "Min": "Min"}
_OPERATORS = {"FloorDiv": "//", "CleanDiv": "//", "IntTrueDiv": None, "Mod": "%", "PythonMod": "%"}


class NotRecordable(KvcellarError):
    """A forward, or a module of it, that cannot be written as a program. The message has the reason."""


class Sizes:
    """Writes expressions of sympy, whose symbols have other names in a program. Each expression is written once."""

    def __init__(self, names: Mapping[Any, str]) -> None:
        """`names` by symbol of sympy."""
        self._names, self._written = dict(names), dict[Any, Size]()

    def of(self, size: Any) -> Size:
        """An int, or a `torch.SymInt`."""
        if isinstance(size, int):
            return size
        expression = size.node.expr
        if expression not in self._written:
            self._written[expression] = int(expression) if expression.is_Integer else self._text(expression)
        return self._written[expression]

    def _text(self, expression: Any) -> str:
        if expression.is_Integer:
            return str(int(expression))
        if expression.is_Symbol:
            if expression not in self._names:
                raise NotRecordable(f"a size depends on {expression}, which is no size of the forward's inputs")
            return self._names[expression]
        name, parts = type(expression).__name__, [self._text(part) for part in expression.args]
        if expression.is_Add:
            return "(" + " + ".join(parts) + ")"
        if expression.is_Mul:
            return "(" + " * ".join(parts) + ")"
        if expression.is_Pow and expression.exp.is_Integer and 0 < expression.exp <= 4:
            return "(" + " * ".join([parts[0]] * int(expression.exp)) + ")"
        if (sign := _OPERATORS.get(name)) is not None:
            return f"({parts[0]} {sign} {parts[1]})"
        if name in _CALLS:
            text = parts[0]
            for part in parts[1:]:
                text = f"{_CALLS[name]}({text}, {part})"
            return text
        raise NotRecordable(f"a size is {expression}, which a program cannot compute")
