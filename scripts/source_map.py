"""Write docs/source-map.md from the docstrings of packages and files: `python scripts/source_map.py`.

Sources are parsed, not imported.
"""

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "kvcellar"
PAGE = ROOT / "docs" / "source-map.md"

HEAD = """\
# Packages and files

*Generated from the docstrings by `make docs`; a test compares the two. Packages import only packages below them on this
page; `make lint` checks it. Files marked (no torch) are imported without torch.*
"""


def render() -> str:
    """The whole page."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = {c["id"]: c for c in project["tool"]["importlinter"]["contracts"]}
    no_torch = set(contracts["no-torch"]["source_modules"])
    parts = [HEAD, f"`kvcellar`: {_opening(SRC / '__init__.py')}\n"]
    for line in contracts["layers"]["layers"]:
        for name in (part.strip(" ()") for part in line.split("|")):
            if (SRC / name / "__init__.py").is_file():
                parts.append(_package(SRC / name, no_torch))
            elif (SRC / f"{name}.py").is_file():
                parts.append(_section(SRC / f"{name}.py", f"{name}.py", no_torch))
    return "\n".join(parts)


def _package(package: Path, no_torch: set[str]) -> str:
    """A package: its description, one line for each of its files, and then the packages in it."""
    title = f"{package.relative_to(SRC)}/"
    level = "#" * title.count("/")
    lines = [_section(package / "__init__.py", title, no_torch, level)]
    files = [file for file in sorted(package.glob("*.py")) if file.name != "__init__.py"]
    lines += [f"- `{file.name}`{_mark(file, no_torch)}: {_opening(file)}" for file in files]
    inner = [_package(file.parent, no_torch) for file in sorted(package.glob("*/__init__.py"))]
    return "\n".join([*lines, *([""] if files else []), *inner])


def _section(file: Path, title: str, no_torch: set[str], level: str = "#") -> str:
    return f"#{level} {title}{_mark(file, no_torch)}\n\n{_opening(file)}\n"


def _mark(file: Path, no_torch: set[str]) -> str:
    parts = ("kvcellar", *file.relative_to(SRC).with_suffix("").parts)
    names = {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
    return " (no torch)" if names & no_torch else ""


def _opening(file: Path) -> str:
    """The first paragraph of a docstring, on one line, without the file's own name before the colon."""
    paragraph = (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0]
    text = " ".join(paragraph.split())
    own = file.parent.name if file.name == "__init__.py" else file.stem
    text = text.removeprefix(f"{own}:").strip()
    return text[:1].upper() + text[1:]


if __name__ == "__main__":
    PAGE.write_text(render())
    print(f"wrote {PAGE.relative_to(ROOT)}")
