"""comments: the comments of fields of classes, which describe them in documents.

The description of a field is the comment on its line, or the comment lines directly above it.
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterator, Mapping

_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")


def plain(comment: str) -> str:
    """A comment without links to files of the documentation."""
    return _LINK.sub(r"\1", comment)


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
    return {node.name: _fields(node, lines) for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


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
