"""keys: the API keys of a server, from a file and from the environment.

A key file is UTF-8 text with one key per line. Spaces around a key, empty lines, and lines that begin with `#` do not
count. Everything else that is not a key is an error with the file and the number of the line, and so is a file without
any key: the server must not be open because of a file that was written wrongly. Messages never hold a key.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from kvcellar.errors import BadRequest
from kvcellar.serve.settings import key_digest

VARIABLE = "KVCELLAR_API_KEY"
MAX_BYTES = 2**20  # of a key file; more is not a key file
SHORTEST, LONGEST = 8, 1024  # characters of a key: a shorter one can be guessed, a longer one fits into few proxies


def key_digests(file: Path | None, environment: Mapping[str, str]) -> tuple[bytes, ...]:
    """Of every key in `file` and in the environment, without repetitions. Raises `BadRequest`, naming what is wrong."""
    digests = list(_digests_in(file)) if file is not None else []
    if (variable := environment.get(VARIABLE)) is not None:
        digests.append(_digest(variable.strip(), f"${VARIABLE}"))
    return tuple(dict.fromkeys(digests))


def exposed(file: Path) -> str | None:
    """Why users other than the owner could read or change the keys in `file`; None if they cannot."""
    about = os.stat(file)
    if not stat.S_ISREG(about.st_mode) or not about.st_mode & 0o026:
        return None
    does = "change" if about.st_mode & 0o022 else "read"
    return f"{file}: other users of this machine can {does} these keys; make it private with chmod 600"


def _digests_in(file: Path) -> dict[bytes, int]:
    """Digest of each key, with the number of its line."""
    found: dict[bytes, int] = {}
    for number, line in enumerate(_text(file).split("\n"), 1):
        key = line.strip(" \t\r")
        if not key or key.startswith("#"):
            continue
        digest = _digest(key, f"{file}, line {number}")
        if digest in found:
            raise _wrong(f"{file}, line {number}: this key is on line {found[digest]} already; remove one of the two")
        found[digest] = number
    if not found:
        raise _wrong(f"{file} has no key: write one per line, or leave the option out to serve without keys")
    return found


def _text(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise _wrong(f"{file} cannot be read: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise _wrong(f"{file} is larger than {MAX_BYTES} bytes; a key file has one key per line")
    try:
        return content.decode("utf-8-sig")  # some editors write a byte order mark, which is no part of the first key
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise _wrong(f"{file}, line {line}: it is not UTF-8 text") from error


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
