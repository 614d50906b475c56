"""tools: what a chat says about tools: which ones the model may call, and whether it has to."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from kvcellar.serve.generation.chat_request import AUTO, Mode, ToolChoice
from kvcellar.serve.http.api_errors import invalid
from kvcellar.serve.http.json_text import printable
from kvcellar.text.replies.tools import MOST_TOOLS

FORMS = '"none", "auto", "required", the name of a function, or allowed_tools'


def tool_choice(value: object) -> ToolChoice:
    """`tool_choice` of a request, as OpenAI's chat API has it, or flat as in its Responses. Raises `ApiError`."""
    match value:
        case None:
            return AUTO
        case "none" | "auto" | "required":
            return ToolChoice(cast("Mode", value))
        case {"type": "function"}:
            return ToolChoice("required", (_name(value, "tool_choice"),))
        case {"type": "allowed_tools"}:
            return _allowed(cast("Mapping[str, Any]", value))
        case _:
            raise invalid("tool_choice", f"tool_choice must be {FORMS}")


def _allowed(value: Mapping[str, Any]) -> ToolChoice:
    given: object = value.get("allowed_tools", value)
    where = "tool_choice.allowed_tools" if "allowed_tools" in value else "tool_choice"
    if not isinstance(given, Mapping):
        raise invalid(where, f"{where} must be an object with mode and tools")
    allowed = cast("Mapping[str, Any]", given)
    tools: object = allowed.get("tools")
    if not isinstance(tools, list) or not tools:
        raise invalid(f"{where}.tools", f"{where}.tools must be a list of functions that is not empty")
    if len(cast("Sequence[object]", tools)) > MOST_TOOLS:
        raise invalid(f"{where}.tools", f"{where}.tools may have {MOST_TOOLS} functions")
    names = tuple(_name(tool, f"{where}.tools[{at}]") for at, tool in enumerate(cast("Sequence[object]", tools)))
    match allowed.get("mode", "auto"):
        case "auto" | "required" as mode:
            return ToolChoice(cast("Mode", mode), names)
        case _:
            raise invalid(f"{where}.mode", f'{where}.mode must be "auto" or "required"')


def _name(value: object, where: str) -> str:
    """The name in `{"type": "function", "function": {"name"}}`, or flat in `{"type": "function", "name"}`."""
    match value:
        case {"type": str(kind)} if kind != "function":
            raise invalid(f"{where}.type", f'{where}.type must be "function", not {printable(repr(kind), 40)}')
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
        case _:
            raise invalid(where, f"{where} must have the name of a function")
