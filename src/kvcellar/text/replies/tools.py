"""tools: the tools of a request, checked, within caps."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kvcellar.errors import BadRequest
from kvcellar.values import deeper, sent

MOST_TOOLS = 512
MOST_CHARS = 256 * 2**10  # of all tools as JSON: what a grammar is made of
MOST_DEPTH = 64
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_EMPTY: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `schema` is the JSON Schema of its arguments, `strict`: they must fit it."""

    name: str
    schema: Mapping[str, Any]
    strict: bool = False

    @property
    def properties(self) -> Mapping[str, Any]:
        found = self.schema.get("properties")
        return cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {}


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request, by name, in order."""

    every: tuple[Tool, ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.every)

    def named(self, name: str) -> Tool | None:
        return next((tool for tool in self.every if tool.name == name), None)

    def only(self, names: Sequence[str]) -> "Tools":
        """Those with these names; all for none. Raises `BadRequest` for a name without a tool."""
        known, wanted = self.names, frozenset(names)
        for name in names:
            if name not in known:
                raise BadRequest(f"tool_choice names {sent(name)}, and no tool has that name", "tool_choice")
        return Tools(tuple(tool for tool in self.every if tool.name in wanted)) if names else self


def checked(tools: Any) -> Tools:
    """The tools of a request, as OpenAI's chat API has them, or flat as in its Responses. Raises `BadRequest`."""
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise BadRequest(f"tools is a list, not {sent(tools)}", "tools")
    listed = cast("Sequence[Any]", tools)
    if len(listed) > MOST_TOOLS:
        raise BadRequest(f"tools has {len(listed)} entries; at most {MOST_TOOLS} are allowed", "tools")
    found = Tools(tuple(_checked(tool, f"tools[{n}]") for n, tool in enumerate(listed)))
    if len(found.names) < len(found.every):
        raise BadRequest("tools has two entries with the same name", "tools")
    if (size := _size(listed)) > MOST_CHARS:
        raise BadRequest(f"tools has {size} characters as JSON; at most {MOST_CHARS} are allowed", "tools")
    return found


def _checked(tool: Any, where: str) -> Tool:
    if not isinstance(tool, Mapping):
        raise BadRequest(f"{where} is an object with a function, not {sent(tool)}", where)
    entry = cast("Mapping[str, Any]", tool)
    if entry.get("type", "function") != "function":
        raise BadRequest(f"{where}.type is {sent(entry['type'])}; only function is supported", f"{where}.type")
    inner: Any = entry.get("function", entry)
    if not isinstance(inner, Mapping):
        raise BadRequest(f"{where}.function is an object with a name, not {sent(inner)}", f"{where}.function")
    function = cast("Mapping[str, Any]", inner)
    name: Any = function.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        said = "up to 64 letters, digits, _ and -"
        raise BadRequest(f"{where}.function.name is {said}, not {sent(name)}", f"{where}.function.name")
    schema: Any = function.get("parameters")
    if schema is not None and not isinstance(schema, Mapping):
        where = f"{where}.function.parameters"
        raise BadRequest(f"{where} is a JSON Schema, an object, not {sent(schema)}", where)
    strict = function.get("strict") is True or entry.get("strict") is True
    return Tool(name, cast("Mapping[str, Any]", schema) if schema else _EMPTY, strict)


def _size(value: Any) -> int:
    """Characters of a value as JSON. Raises `BadRequest` for what is no JSON, or nested too deep."""
    if deeper(value, MOST_DEPTH):
        raise BadRequest(f"tools is nested more than {MOST_DEPTH} levels deep", "tools")
    try:
        return len(json.dumps(value, ensure_ascii=False, default=dict))
    except (TypeError, ValueError) as error:
        raise BadRequest(f"tools is not JSON: {error}", "tools") from None
