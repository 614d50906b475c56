"""keys: reads API keys from a file and from the environment.

A key file is UTF-8 text with one key per line. Spaces around a key, empty lines, and lines that begin with `#` are
ignored, except that the comments directly above a key may have its name, `# name: NAME`, and its weight in the sharing
of sequences, `# weight: 2`; other keys are named by their file and line. Any other line that is not a key raises an
error with the file and the line number, and so does a file without keys: a mistake in the file must not leave the
server open. Messages never contain a key.
"""

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from kvcellar.errors import BadRequest
from kvcellar.memory.retention import LEAST_WEIGHT, MOST_WEIGHT
from kvcellar.serve.http.key_ring import Keys
from kvcellar.serve.settings import key_digest

VARIABLE, ADMIN_VARIABLE, METRICS_VARIABLE = "KVCELLAR_API_KEY", "KVCELLAR_ADMIN_KEY", "KVCELLAR_METRICS_KEY"
MAX_BYTES = 2**20  # largest key file
_NAME = re.compile(r"#[ \t]*name:[ \t]*([A-Za-z0-9][A-Za-z0-9._@-]{0,63})")
_WEIGHT, _NUMBER = re.compile(r"#[ \t]*weight:[ \t]*(.*)"), re.compile(r"[0-9]{1,4}(\.[0-9]{1,4})?")
SHORTEST, LONGEST = 8, 1024  # characters; shorter keys can be guessed, longer ones exceed limits of proxies


class _Key(NamedTuple):
    line: int
    key: str
    name: str
    weight: float


def named_keys(
    file: Path | None, environment: Mapping[str, str], variable: str = VARIABLE, param: str = "api_key_file"
) -> dict[bytes, str]:
    """Names of the keys in `file` and in the environment, by digest. Raises `BadRequest` with the place."""
    return {digest: key.name for digest, key in _read(file, environment, variable, param).items()}


def read_keys(api: Path | None, admin: Path | None, metrics: Path | None, environment: Mapping[str, str]) -> Keys:
    """All keys of a server. Raises `BadRequest` with the place."""
    found = _read(api, environment, VARIABLE, "api_key_file")
    return Keys(
        {digest: key.name for digest, key in found.items()},
        named_keys(admin, environment, ADMIN_VARIABLE, "admin_key_file"),
        named_keys(metrics, environment, METRICS_VARIABLE, "metrics_key_file"),
        {digest: key.weight for digest, key in found.items()},
    )


def _read(file: Path | None, environment: Mapping[str, str], variable: str, param: str) -> dict[bytes, _Key]:
    try:
        found = _keys_in(file) if file is not None else {}
        if (key := environment.get(variable)) is not None:
            found.setdefault(_digest(key.strip(), f"${variable}"), _Key(0, key, f"${variable}", 1.0))
    except BadRequest as error:
        raise BadRequest(error.message, param) from error
    return found


def admin_key(file: Path | None, environment: Mapping[str, str]) -> str | None:
    """The first key of a file, or the one in the environment, to be sent to a server. Raises `BadRequest`."""
    try:
        return next(iter(_keys_in(file).values())).key if file is not None else environment.get(ADMIN_VARIABLE)
    except BadRequest as error:
        raise BadRequest(error.message, "admin_key_file") from error


def permission_warning(file: Path) -> str | None:
    """A warning if users other than the owner can read or change `file`; None if they cannot, or it is not there."""
    try:
        about = os.stat(file)
    except OSError:
        return None
    if not stat.S_ISREG(about.st_mode) or not about.st_mode & 0o026:
        return None
    does = "change" if about.st_mode & 0o022 else "read"
    return f"{file}: other users of this machine can {does} these keys; make it private with chmod 600"


def _keys_in(file: Path) -> dict[bytes, _Key]:
    """By the digest of each key."""
    found: dict[bytes, _Key] = {}
    text = text_of(file, MAX_BYTES, "api_key_file", "; a key file has one key per line")
    name, weight = None, 1.0  # of the next key, by the comments directly above it
    for number, line in enumerate(text.split("\n"), 1):
        key = line.strip(" \t\r")
        if (named := _NAME.fullmatch(key)) is not None:
            name = named[1]
        elif (stated := _WEIGHT.fullmatch(key)) is not None:
            weight = _weight(stated[1], f"{file}, line {number}")
        elif not key or key.startswith("#"):
            name, weight = None, 1.0
        if not key or key.startswith("#"):
            continue
        digest = _digest(key, f"{file}, line {number}")
        if digest in found:
            raise _wrong(
                f"{file}, line {number}: this key is on line {found[digest].line} already; remove one of the two"
            )
        found[digest] = _Key(number, key, name or f"{file.name}:{number}", weight)
        name, weight = None, 1.0
    if not found:
        raise _wrong(f"{file} has no key: write one per line, or leave the option out to serve without keys")
    return found


def _weight(stated: str, where: str) -> float:
    weight = float(stated) if _NUMBER.fullmatch(stated) else 0.0
    if not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
        allowed = f"from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}"
        raise _wrong(f"{where}: the weight of a key is a number {allowed}, like 2 or 0.5")
    return weight


def _digest(key: str, where: str) -> bytes:
    if not key:
        raise _wrong(f"{where} is set but empty: unset it to serve without keys, or put a key into it")
    if any(c.isspace() for c in key):
        raise _wrong(f"{where}: a key has no spaces inside; write one key per line")
    if not SHORTEST <= len(key) <= LONGEST:
        raise _wrong(f"{where}: a key has {SHORTEST} to {LONGEST} characters, this one has {len(key)}")
    try:
        return key_digest(key)
    except BadRequest as error:
        raise _wrong(f"{where}: {error}") from error


def _wrong(message: str) -> BadRequest:
    return BadRequest(message, "api_key_file")


def text_of(file: Path, most: int, option: str, hint: str = "") -> str:
    """The text of a file of at most `most` bytes. Raises `BadRequest` for `option` with the place; `hint` is for one
    that is larger."""
    try:
        with file.open("rb") as opened:
            content = opened.read(most + 1)
    except OSError as error:
        raise BadRequest(f"{file} cannot be read: {error.strerror}", option) from error
    if len(content) > most:
        raise BadRequest(f"{file} is larger than {most} bytes{hint}", option)
    try:
        return content.decode("utf-8-sig")  # skips the byte order mark that some editors write
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise BadRequest(f"{file}, line {line}: it is not UTF-8 text", option) from error
