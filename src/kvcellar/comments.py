"""comments: comments of fields, read from the source of their class: the one on the line of a field, and the comment
lines directly above it."""

import ast
import inspect
import sys
import threading
from collections.abc import Iterator, Mapping

_PARSING = threading.Lock()  # ast of Python 3.11 raises `SystemError` where two threads parse at the same time


class Comments:
    """Reads each module once."""

    def __init__(self) -> None:
        self._modules: dict[str, Mapping[str, Mapping[str, str]]] = {}

    def of(self, cls: type) -> Mapping[str, str]:
        """The comment of each field that the body of `cls` declares, empty where there is none."""
        name = cls.__module__
        if name not in self._modules:
            self._modules[name] = _classes(inspect.getsource(sys.modules[name]))
        return self._modules[name].get(cls.__name__, {})


def _classes(source: str) -> dict[str, dict[str, str]]:
    lines = source.split("\n")
    with _PARSING:
        body = ast.parse(source).body
    return {node.name: _fields(node, lines) for node in body if isinstance(node, ast.ClassDef)}


def _fields(cls: ast.ClassDef, lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.end_lineno is not None:
            comment = [*_above(lines, node.lineno - 1), *_beside(lines[node.end_lineno - 1])]
            found[node.target.id] = " ".join(comment)
    return found


def _above(lines: list[str], at: int) -> list[str]:
    found: list[str] = []
    while lines[at - 1].strip().startswith("# "):
        at -= 1
        found.insert(0, lines[at].strip().removeprefix("# "))
    return found


def _beside(line: str) -> Iterator[str]:
    _, found, comment = line.partition("  # ")
    if found and not comment.startswith("type: "):
        yield comment
