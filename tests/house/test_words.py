"""What must not be in the tree: paths of one machine, unsafe loading, mutable globals, words for persons about data."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for part in ("src", "benchmarks") for path in (ROOT / part).rglob("*.py"))
PARTS = ("src", "benchmarks", "tests", "docs", "scripts", "examples", ".ci")
TEXTS = sorted(
    path
    for path in [*ROOT.glob("*"), *(f for part in PARTS for f in (ROOT / part).rglob("*"))]
    if path.suffix in {".py", ".md", ".toml", ".txt", ".yaml", ".sh", ".html"} or path.name in {"Makefile", "run"}
    if path.is_file()
)

# Written so that this file does not hold what it forbids.
FOLDERS = ("work", "tmp", "root", "home", "Users", "mnt", "opt", "farm")
PLACE = re.compile(r"(?<![\w.~<>{}])/(?:" + "|".join(FOLDERS) + r")/[\w.]")
INDEX = re.compile(r"pyp[i]\.org|pytorc[h]\.org|npmj[s]\.(org|com)|pythonhoste[d]")
PERSONS = re.compile(r"\b([Nn]obody|[Ss]omebody|[Ww]hoever|[Aa]nybody|[Ee]verybody|lets? go of|of its own accord)\b")
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "shelve", "marshal", "joblib", "cloudpickle"}


def unsafe(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and reason of each thing that our sources do without."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, f"imports {n.name}") for n in names if n.name.split(".")[0] in PICKLES)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in PICKLES:
                yield node.lineno, f"imports {module}"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")):
                yield node.lineno, "torch.load runs code from a file"
            case ast.Call(func=ast.Name(id="hasattr" | "eval" | "exec" as name)):
                yield node.lineno, f"{name}()"
            case ast.Global():
                yield node.lineno, "a global that changes"
            case ast.keyword(arg="trust_remote_code", value=value) if not is_false(value):
                yield node.lineno, "remote code"
            case ast.ExceptHandler(type=None):
                yield node.lineno, "an except that names nothing"


def is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def inside(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=inside)
def test_sources_open_with_a_docstring_and_do_without(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{inside(path)} has no docstring"
    found = list(unsafe(tree))
    assert not found, "\n".join(f"{inside(path)}:{line}: {why}" for line, why in found)


@pytest.mark.parametrize("pattern", [PLACE, INDEX], ids=["no place of one machine", "no package index"])
def test_texts_hold(pattern):
    found = [
        f"{inside(path)}:{number}: {line.strip()[:100]}"
        for path in TEXTS
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)


def test_sources_and_documents_do_not_describe_data_as_persons():
    found = [
        f"{inside(path)}:{number}: {line.strip()[:100]}"
        for path in [*SOURCES, *(ROOT / "docs").rglob("*.md")]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PERSONS.search(line)
    ]
    assert not found, "\n".join(found)
    assert PERSONS.search("Nobody reads it")


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "hasattr(model, 'cache')",
        "load(name, trust_remote_code=True)",
        "def f():\n    global x\n    x = 1",
        "try:\n    pass\nexcept:\n    pass",
    ],
)
def test_the_check_sees(line):
    assert list(unsafe(ast.parse(line)))


def test_the_check_lets_pass():
    good = "import safetensors\nload(name, trust_remote_code=False)\ntry:\n    pass\nexcept ValueError:\n    pass"
    assert not list(unsafe(ast.parse(good)))
