"""pinned: reads a file of prompts to pin, and pins them.

A file is UTF-8 text with one JSON object per line, which has either "prompt", a text or a list of token ids, or
"messages", the first messages of chats. Empty lines are ignored. Any other line raises an error with the file and the
line number, before a model is loaded if that is possible.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcellar.engine.engine import Engine
from kvcellar.errors import BadRequest, KvcellarError, shown
from kvcellar.serve.text_file import text_of

MOST_BYTES = 64 * 2**20  # of a file


@dataclass(frozen=True, slots=True)
class Line:
    """A prompt, and where it is."""

    where: str
    prompt: str | list[Any]


def read_pinned(file: Path) -> list[Line]:
    """The prompts of a file, in order. Raises `BadRequest`."""
    return [
        Line(where, _prompt(where, line))
        for number, line in enumerate(text_of(file, MOST_BYTES, "pin_file").split("\n"), 1)
        if line.strip() and (where := f"{file}, line {number}")
    ]


def pin_all(engine: Engine, lines: list[Line], adapter: str | None, going_on: Callable[[], None] = lambda: None) -> str:
    """Pin the prompts, for requests with an adapter; returns what that has taken, in words. Raises `BadRequest` with
    the place. `going_on` is called before each, and may raise."""
    tokens = found = 0
    for line in lines:
        going_on()
        try:
            usage = engine.pin(line.prompt, adapter=adapter)
        except KvcellarError as error:
            raise _wrong(f"{line.where}: {error}") from error
        tokens, found = tokens + usage.prompt_tokens, found + usage.cached_tokens
    return f"{len(lines)} prompts with {tokens} tokens are pinned; {found} tokens did not have to be computed"


def _prompt(where: str, line: str) -> str | list[Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"{where}: it is not JSON: {error}") from error
    if not isinstance(found, dict) or len(found) != 1 or not found.keys() <= {"prompt", "messages"}:
        raise _wrong(f'{where}: it must be an object with either "prompt" or "messages", not {shown(found)}')
    ((name, value),) = found.items()
    if name == "prompt" and value and (isinstance(value, str) or _all(value, int)):
        return value
    if name == "messages" and value and _all(value, dict):
        return value
    what = "a text or a list of token ids" if name == "prompt" else "a list of messages"
    raise _wrong(f"{where}: {name} must be {what}, and not empty, not {shown(value)}")


def _all(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(type(one) is kind for one in value)


def _wrong(message: str) -> BadRequest:
    return BadRequest(message, "pin_file")
