"""Check what changed against the branch main, within a minute: style, types, imports, and the tests nearest to it.

    python scripts/check.py [BASE]

A test is the nearer the fewer imports lead from it to a changed module; of those that are equally near, the one that
imports the fewest modules is first. A test of a page or another file is near to what it names. `SECONDS` bound the
tests: what does not run in them is counted at the end, and `make test` runs it.
"""

import ast
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 40
MOST = 12  # files of tests: collecting more takes longer than running them


def git(*words: str) -> list[str]:
    ran = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return ran.stdout.splitlines() if ran.returncode == 0 else []


def changed(base: str) -> list[str]:
    """Paths that differ from where this branch left `base`, or from the last commit if there is none, and new ones."""
    start = next(iter(git("merge-base", "HEAD", base)), "HEAD")
    differ = git("diff", "--name-only", "--diff-filter=d", start)
    return sorted({*differ, *git("ls-files", "--others", "--exclude-standard")})


def modules(root: Path) -> dict[str, Path]:
    """Files by the names of their modules."""
    found: dict[str, Path] = {}
    for folder, within in (("src", root / "src"), ("tests", root), ("benchmarks", root), ("scripts", root)):
        for path in (within if folder == "src" else within / folder).rglob("*.py"):
            found[".".join(path.relative_to(within).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """Modules of ours that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from [name for name in names if name in known] or [node.module]


def distances(start: str, imports: Mapping[str, frozenset[str]]) -> dict[str, int]:
    """Of each module that `start` imports, through others: how many imports lead there."""
    found, waiting = {start: 0}, deque([start])
    while waiting:
        name = waiting.popleft()
        for one in imports[name] - found.keys():
            found[one] = found[name] + 1
            waiting.append(one)
    return found


def nearest(paths: Iterable[str], root: Path = ROOT) -> list[Path]:
    """Files of tests that import, or name, what is at these paths; the nearest first."""
    known = modules(root)
    imports = {name: frozenset(imported(path, known)) for name, path in known.items()}
    touched = {name for name, path in known.items() if str(path.relative_to(root)) in {*paths}}
    named = {Path(path).name for path in paths if not path.endswith(".py")}
    ranked: list[tuple[int, int, Path]] = []
    for name, path in known.items():
        if path.name.startswith("test_"):
            reached = distances(name, imports)
            hops = min((reached[one] for one in touched & reached.keys()), default=None)
            if hops is None and any(word in path.read_text() for word in named):
                hops = 1
            if hops is not None:
                ranked.append((hops, len(reached), path))
    return [path for *_, path in sorted(ranked)]


def main() -> int:
    paths = changed(*sys.argv[1:2] or ["main"])
    sources = [path for path in paths if path.endswith(".py")]
    if not paths:
        print("nothing changed")
        return 0
    here = Path(sys.executable).parent
    commands = [[f"{here}/lint-imports"]] if any(path.startswith("src/") for path in sources) else []
    if sources:
        commands += [[f"{here}/ruff", "check", *sources], [f"{here}/ruff", "format", "--check", *sources]]
    if typed := [path for path in sources if path.startswith(("src/", "benchmarks/"))]:
        commands.append([f"{here}/pyright", "--pythonpath", sys.executable, *typed])
    beside = [subprocess.Popen(command, cwd=ROOT) for command in commands]
    tests = nearest(paths)
    print(f"{len(paths)} files changed; {len(tests)} files of tests import or name them; {min(len(tests), MOST)} run")
    codes = [0]
    if tests:
        words = ["-q", "-r", "fE", "--seconds", str(SECONDS), *map(str, tests[:MOST])]
        codes.append(subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, check=False).returncode)
    codes += [process.wait() for process in beside]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
