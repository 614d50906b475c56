"""probing: the form of a model whose chat template is not known, found by rendering a call.

The template writes a call with a name and arguments that occur nowhere else. Where these are JSON, the texts around
them are the marks of a call. A form is used only if what the template writes for two calls is read back as two.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from kvcellar.text.pieces import CallClosed, CallOpened
from kvcellar.text.replies.form import Body, ReplyForm, Section
from kvcellar.text.replies.machine import Machine
from kvcellar.text.replies.outline import Outline
from kvcellar.text.replies.tools import Tool, Tools

PROBED = "a call was rendered by the chat template"
NAME, KEY, VALUE = "probename", "probekey", "probevalue"
_MARK = re.compile(r"\s*(?:[<\[]+[^<\[\s][^<\[\n]*|[^<\[\s]+)")
Written = Callable[[str, Mapping[str, Any], int], str | None]


def probed(written: Written) -> ReplyForm | None:
    """The form in which a template writes calls, if it is JSON. `written(name, arguments, count)` is what it writes for
    an answer of so many calls."""
    text = written(NAME, {KEY: VALUE}, 1)
    if text is None or NAME not in text or VALUE not in text:
        return None
    for build in (_object, _named):
        section = build(text)
        form = ReplyForm("probed", PROBED, (section,)) if section is not None else None
        if form is not None and _reads(form, written(NAME, {KEY: VALUE}, 2) or text):
            return form
    return None


def _reads(form: ReplyForm, text: str) -> bool:
    """Is a text read as calls, and does it begin with one?"""
    tool = Tool(NAME, {"type": "object"})
    machine = Machine(Outline(form, Tools((tool,)), deltas=False), lambda kind: "")
    pieces = [*machine.push(text), *machine.end()]
    count = text.count(NAME)
    return sum(isinstance(piece, CallClosed) for piece in pieces) == count and isinstance(pieces[0], CallOpened)


def _object(text: str) -> Section | None:
    """Marks around an object that has the name and the arguments."""
    start = text.rfind("{", 0, text.index(NAME))
    while start >= 0:
        found = _json_at(text, start)
        if found is not None and found[0].get("name") == NAME:
            value, end = found
            key = next((key for key in ("arguments", "parameters") if value.get(key) == {KEY: VALUE}), None)
            begin, finish = text[:start], _mark(text[end:])
            if key is None:
                return None
            if not begin.strip():
                return Section(begin=("{",), body=Body.OBJECT, arguments=key, bare=True)
            return Section(begin=(begin.lstrip(),), body=Body.OBJECT, arguments=key, finish=(finish,))
        start = text.rfind("{", 0, start)
    return None


def _named(text: str) -> Section | None:
    """Marks around a name, and an object with the arguments behind it."""
    start = text.find("{", text.index(NAME))
    found = _json_at(text, start) if start >= 0 else None
    begin, after = text[: text.index(NAME)], text[text.index(NAME) + len(NAME) : start]
    if found is None or found[0] != {KEY: VALUE} or "{" in begin or not begin.strip() or not after.strip():
        return None
    return Section(begin=(begin.lstrip(),), body=Body.ARGUMENTS, after_name=(after,), finish=(_mark(text[found[1] :]),))


def _json_at(text: str, start: int) -> tuple[dict[str, Any], int] | None:
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except ValueError:
        return None
    return (cast("dict[str, Any]", value), end) if isinstance(value, dict) else None


def _mark(text: str) -> str:
    """The mark that ends a call: what follows it, up to the next mark or the end of the line."""
    match = _MARK.match(text)
    return match[0] if match is not None else ""
