"""Files, classes and functions of the package stay small enough to be read.

A function counts the lines of its body: without signature, docstrings, comments and blank lines, with the functions
defined inside it. Bodies of `...` (protocols, overloads) are no functions here. `OVER` names what is over a limit now;
a name that is no longer over its limit has to be removed from it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src/kvcellar"
FILE_LINES, PUBLIC_MEMBERS, MEDIAN, NINETIETH, LONGEST = 400, 20, 6, 18, 40
OVER: set[str] = set()
Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> Iterator[tuple[str, str, ast.Module]]:
    """Name, text and tree of each Python file."""
    for file in sorted(SRC.rglob("*.py")):
        text = file.read_text()
        yield str(file.relative_to(SRC)), text, ast.parse(text)


def docstring(node: ast.AST) -> range:
    """The lines of a docstring; none where there is none."""
    if isinstance(node, Function | ast.ClassDef) and ast.get_docstring(node) is not None:
        return range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    return range(0)


def body_lines(text: str, function: Function) -> int:
    lines = text.splitlines()
    documented = {number for node in ast.walk(function) for number in docstring(node)}
    body = range(function.body[0].lineno, (function.end_lineno or 0) + 1)
    return sum(1 for n in body if n not in documented and (code := lines[n - 1].strip()) and not code.startswith("#"))


def is_stub(function: Function) -> bool:
    last = function.body[-1]
    return isinstance(last, ast.Expr) and isinstance(last.value, ast.Constant) and last.value.value is ...


def functions() -> dict[str, int]:
    """Lines of every function, by file, name and line."""
    return {
        f"{name}:{node.name}:{node.lineno}": body_lines(text, node)
        for name, text, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, Function) and not is_stub(node)
    }


def public_members(node: ast.ClassDef) -> set[str]:
    return {item.name for item in node.body if isinstance(item, Function) and not item.name.startswith("_")}


def over() -> set[str]:
    """What is over the limits of files, classes and single functions."""
    found = {name for name, text, _ in sources() if text.count("\n") > FILE_LINES}
    for name, _, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and len(public_members(node)) > PUBLIC_MEMBERS:
                found.add(f"{name}:{node.name}")
    return found | {name.rpartition(":")[0] for name, lines in functions().items() if lines > LONGEST}


def test_nothing_is_over_its_limit_but_what_is_listed() -> None:
    found = over()
    assert found - OVER == set(), f"over {FILE_LINES} lines, {PUBLIC_MEMBERS} public members or {LONGEST} lines of body"
    assert OVER - found == set(), "no longer over a limit: remove it from OVER"


def test_functions_are_short() -> None:
    lines = sorted(functions().values())
    median, ninetieth = lines[len(lines) // 2], lines[len(lines) * 9 // 10]
    found = f"{len(lines)} functions: median {median}, 90th percentile {ninetieth}, longest {lines[-1]}"
    assert median <= MEDIAN, found
    assert ninetieth <= NINETIETH, found


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f():\n    return 1", 1),
        ('def f():\n    """Two\n    lines."""\n\n    # why\n    return (\n        1\n    )', 3),
        ('def f():\n    def g():\n        """Says."""\n        return 1\n\n    return g', 3),
    ],
)
def test_lines_of_a_body_are_counted(source: str, expected: int) -> None:
    function = ast.parse(source).body[0]
    assert isinstance(function, Function)
    assert body_lines(source, function) == expected
    assert not is_stub(function)


@pytest.mark.parametrize("source", ["def f(): ...", 'def f():\n    """Says."""\n    ...'])
def test_a_body_of_dots_is_a_stub(source: str) -> None:
    function = ast.parse(source).body[0]
    assert isinstance(function, Function)
    assert is_stub(function)
