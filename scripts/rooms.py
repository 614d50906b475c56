"""Write docs/rooms.md from the docstrings of packages and files: `python scripts/rooms.py`.

Sources are parsed, not imported.
"""

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "kvcellar"
MAP = ROOT / "docs" / "rooms.md"

HEAD = """\
# Packages and files

*Generated from the docstrings by `make docs`; a test compares the two. Packages import only packages below them on this
page; `make lint` checks it. Files marked (no torch) are imported without torch.*
"""


def render() -> str:
    """The whole page."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = {c["id"]: c for c in project["tool"]["importlinter"]["contracts"]}
    thinking = set(contracts["thinking"]["source_modules"])
    parts = [HEAD, f"`kvcellar`: {_opening(SRC / '__init__.py')}\n"]
    for line in contracts["rooms"]["layers"]:
        for name in (part.strip(" ()") for part in line.split("|")):
            if (SRC / name / "__init__.py").is_file():
                parts.append(_room(SRC / name, thinking))
            elif (SRC / f"{name}.py").is_file():
                parts.append(_section(SRC / f"{name}.py", f"{name}.py", thinking))
    return "\n".join(parts)


def _room(room: Path, thinking: set[str]) -> str:
    """A package: its description, then one line for each of its files."""
    lines = [_section(room / "__init__.py", f"{room.name}/", thinking)]
    for file in sorted(room.rglob("*.py")):
        if file.parent == room and file.name == "__init__.py":
            continue
        name = str(file.relative_to(room)).replace("__init__.py", "")
        lines.append(f"- `{name}`{_mark(file, thinking)}: {_opening(file)}")
    return "\n".join([*lines, ""])


def _section(file: Path, title: str, thinking: set[str]) -> str:
    return f"## {title}{_mark(file, thinking)}\n\n{_opening(file)}\n"


def _mark(file: Path, thinking: set[str]) -> str:
    parts = ("kvcellar", *file.relative_to(SRC).with_suffix("").parts)
    names = {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
    return " (no torch)" if names & thinking else ""


def _opening(file: Path) -> str:
    """The first paragraph of a docstring, on one line, without the file's own name before the colon."""
    paragraph = (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0]
    text = " ".join(paragraph.split())
    own = file.parent.name if file.name == "__init__.py" else file.stem
    text = text.removeprefix(f"{own}:").strip()
    return text[:1].upper() + text[1:]


if __name__ == "__main__":
    MAP.write_text(render())
    print(f"wrote {MAP.relative_to(ROOT)}")
