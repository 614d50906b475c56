"""Print what the source weighs: files and lines of each package and folder, the largest files, the longest functions.

    python scripts/weight.py

A report, not a limit: a file has the size of its idea.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "kvcellar"
LARGEST = 10
LONG = 60  # lines of a function


def functions(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and place of each function of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.end_lineno - node.lineno + 1, f"{path.relative_to(SRC)}:{node.lineno} {node.name}"


def main() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in sorted(SRC.rglob("*.py"))}
    files, of = Counter[str](), Counter[str]()
    for path, count in lines.items():
        for folder in path.relative_to(SRC).parents:
            files[str(folder)] += 1
            of[str(folder)] += count
    print(f"{len(lines)} files, {sum(lines.values())} lines of Python in {SRC.name}")
    for folder in sorted(of):
        print(f"  {of[folder]:6} lines in {files[folder]:3} files  {'  ' * folder.count('/')}{folder}/")
    print("Largest files:")
    for path, count in sorted(lines.items(), key=lambda one: -one[1])[:LARGEST]:
        print(f"  {count:6} lines  {path.relative_to(SRC)}")
    print(f"Functions of more than {LONG} lines:")
    for count, place in sorted((one for path in lines for one in functions(path) if one[0] > LONG), reverse=True):
        print(f"  {count:6} lines  {place}")


if __name__ == "__main__":
    main()
