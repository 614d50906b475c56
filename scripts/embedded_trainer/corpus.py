"""Selects files of the Python standard library for training and for held-out text.

The corpus is the library of the interpreter that runs the trainer, so it differs between installs; the manifest of a
trained model names each file with its hash.
"""

import hashlib
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

FOREIGN_FOLDERS = {"site-packages", "_bundled", "pydoc_data", "encodings", "__pycache__"}
TEST_FOLDERS = {"test", "tests", "idle_test"}
SMALLEST = 200  # bytes; below it a file is an empty package
MOST_DIGITS = 0.12  # share of characters; above it a file is a table
NOTICE_LINES = 80
LONGEST_NOTICE = 40  # lines

RESERVED = re.compile(r"all rights reserved|permission (?:is hereby granted|to use)|redistribution and use", re.I)
GRANT = re.compile(r"permission (?:is hereby granted|to use)|redistribution and use|licensed under the", re.I)
COPYRIGHT = re.compile(r"copyright\b.*(?:\(c\)|\d{4})", re.I)
CLAIM = re.compile(
    rf"{COPYRIGHT.pattern}|copyright \w+ \w+,? inc\b|copyright .*all rights reserved|FileCopyrightText", re.I
)
FOUNDATION = re.compile(r"Python Software Foundation|Licensed to (?:the )?PSF", re.I)


@dataclass(frozen=True, slots=True)
class Source:
    """One file: its path below the library's folder, the hash of its bytes, its text with tabs expanded."""

    path: str
    sha256: str
    text: str

    @property
    def held_out(self) -> bool:
        """One path in twenty, chosen by the path alone, so that it stays held out on every install."""
        return int(hashlib.sha256(self.path.encode()).hexdigest(), 16) % 20 == 7

    @property
    def is_test(self) -> bool:
        return bool(TEST_FOLDERS & set(Path(self.path).parts))


@dataclass(frozen=True, slots=True)
class Corpus:
    """The four pools, and the paths dropped because their authors' notices are not the foundation's."""

    library: tuple[Source, ...]
    tests: tuple[Source, ...]
    held_library: tuple[Source, ...]
    held_tests: tuple[Source, ...]
    dropped: tuple[str, ...]


def standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def carries_own_notice(text: str) -> bool:
    """Whether the first lines claim rights for others than the Python Software Foundation."""
    head = text.splitlines()[:NOTICE_LINES]
    if any("licensed to psf" in line.lower() for line in head):
        return False
    return any(RESERVED.search(line) or (COPYRIGHT.search(line) and not FOUNDATION.search(line)) for line in head)


def own_notice(text: str) -> str:
    """What a file says of the rights of others than the foundation: its copyright lines, or, where it states a
    permission, everything from the first such line to the end of that comment. Empty where it says nothing."""
    lines = text.splitlines()
    claims = [i for i, line in enumerate(lines) if CLAIM.search(line) and not FOUNDATION.search(line)]
    if not claims:
        return ""
    first = claims[0]
    commented = lines[first].startswith("#")
    ends = (
        i for i, line in enumerate(lines) if i > first and (not line.startswith("#") if commented else '"""' in line)
    )
    whole = lines[first : next(ends, len(lines))][:LONGEST_NOTICE]
    quoted = whole if any(GRANT.search(line) for line in whole) else [lines[i] for i in claims]
    return "\n".join(line.lstrip("#. ").rstrip() for line in quoted).strip()


def is_prose_or_code(relative: Path) -> bool:
    """False for folders and files that are tables, topic text, other people's packages, or hold build paths."""
    parts = relative.parts
    if FOREIGN_FOLDERS & set(parts[:-1]) or any(part.startswith("config-") for part in parts):
        return False
    return not relative.name.startswith("_sysconfigdata") and relative.as_posix() != "html/entities.py"


def read(root: Path, relative: Path) -> Source | None:
    """The file as text, or None where it is tiny, not UTF-8, or mostly digits."""
    raw = (root / relative).read_bytes()
    if len(raw) < SMALLEST:
        return None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return None
    text = text.replace("\r\n", "\n").expandtabs(8)
    if sum(c.isdigit() for c in text) > MOST_DIGITS * len(text):
        return None
    return Source(relative.as_posix(), hashlib.sha256(raw).hexdigest(), text)


def gather(root: Path, *, with_tests: bool = True) -> Corpus:
    """All usable files below `root`, in order of their paths."""
    pools: dict[tuple[bool, bool], list[Source]] = {(t, h): [] for t in (False, True) for h in (False, True)}
    dropped = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        source = read(root, relative) if is_prose_or_code(relative) else None
        if source is None or (source.is_test and not with_tests):
            continue
        if carries_own_notice(source.text):
            dropped.append(source.path)
        else:
            pools[source.is_test, source.held_out].append(source)
    return Corpus(
        library=tuple(pools[False, False]),
        tests=tuple(pools[True, False]),
        held_library=tuple(pools[False, True]),
        held_tests=tuple(pools[True, True]),
        dropped=tuple(dropped),
    )
