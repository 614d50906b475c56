"""The Python in documents runs, their commands and options exist, and their links have targets."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvcellar import Engine
from kvcellar.cli.main import cli
from kvcellar.serve import Server, ServeSettings

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src/kvcellar"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
ADDRESS = f"http://{ServeSettings().host}:{ServeSettings().port}"  # of the documents' server; ours takes its place
SHELLS = {"sh", "bash", "shell", "console", "ini", "dockerfile"}


@dataclass(frozen=True)
class Fence:
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def fences() -> Iterator[Fence]:
    for page in PAGES:
        text = page.read_text()
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
            yield Fence(page, text.count("\n", 0, found.start()) + 1, found[1], found[2])


# What stands in these folders of docs/ is run by tests/house/test_howto.py, page by page.
PAGE_BY_PAGE = ("howto", "tutorials")
PYTHON = [f for f in fences() if f.language == "python" and f.page.parent.name not in PAGE_BY_PAGE]
SHELL = [f for f in fences() if f.language in SHELLS]
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server on the embedded model."""
    with Engine() as engine, Server(engine, ServeSettings(port=0)) as server:
        yield server.url


@pytest.mark.parametrize("fence", PYTHON, ids=str)
def test_python_runs(fence, request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = fence.text
    if ADDRESS in code:
        code = code.replace(ADDRESS, request.getfixturevalue("server"))
    exec(compile(code, str(fence), "exec"), {"__name__": "__fence__"})


@pytest.mark.parametrize("fence", SHELL, ids=str)
def test_commands_exist(fence):
    commands = list(commands_of(fence.text))
    assert commands or fence.page.parent.name in PAGE_BY_PAGE, "nothing here is checked, or run by test_howto.py"
    for program, verb, options in commands:
        if program == "make":
            assert verb in TARGETS
        else:
            text = help_of(verb)
            assert [o for o in options if o not in text] == [], f"kvcellar {verb} has no such option"


def commands_of(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Program, verb and options of each call of make or kvcellar."""
    for line in text.splitlines():
        command = line.partition(" #")[0]
        for found in re.finditer(r"(?:^|[\s/|])(make|kvcellar) +((?:(?:cache|cluster) )?[a-z][a-z-]*)([^|]*)", command):
            yield found[1], found[2], re.findall(r"(?<=\s)--[a-z][a-z-]*", found[3])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_mentions_are_of_what_exists(page):
    """Also in the text: `make x`, `kvcellar x --y` and [links](to/files)."""
    for code in re.findall(r"`([^`\n]+)`", page.read_text()):
        for program, verb, options in commands_of(code):
            assert program != "make" or verb in TARGETS, code
            assert program != "kvcellar" or not set(options) - set(help_of(verb).split()), code
    for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        assert "://" in link or (page.parent / link).exists(), f"a link to nowhere: {link}"


# Dated entries keep the names of their day, and the generated list of files has them relative to its headings.
TODAY = [page for page in PAGES if page.name not in ("CHANGELOG.md", "log.md", "source-map.md")]


@pytest.mark.parametrize("page", TODAY, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_that_are_named_exist(page):
    """Paths are relative to the root, the package or the page; names in parentheses after a file are in that file."""
    text = page.read_text()
    for path in re.findall(r"`([\w.-]+(?:/[\w.-]+)*(?:/|\.(?:py|cpp|md|toml)))`", text):
        assert any((base / path).exists() for base in (ROOT, SRC, page.parent)), path
    for path, names in re.findall(r"`([\w/]+\.py)` \(((?:`\w+`(?:, )?)+)\)", text):
        source = (SRC / path).read_text()
        for name in re.findall(r"\w+", names):
            assert re.search(rf"^\s*(?:def|class) {name}\b|^{name}\b.* = ", source, re.M), f"{path} has no {name}"


def test_the_readme_is_short_and_counts_models_as_the_table_does():
    readme = (ROOT / "README.md").read_text()
    assert readme.count("\n") < 150
    counted = re.search(r"\*\*(\d+ of the \d+ types)", (ROOT / "docs/models.md").read_text())
    assert counted is not None
    assert counted[1] in readme


@cache
def help_of(verb: str) -> str:
    """The output of `kvcellar COMMAND --help`."""
    result = CliRunner().invoke(cli, [*verb.split(), "--help-all"])
    if result.exit_code == 2:  # it has few options
        result = CliRunner().invoke(cli, [*verb.split(), "--help"])
    assert result.exit_code == 0, f"kvcellar {verb}: {result.output}"
    return result.output
