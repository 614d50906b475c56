"""calls: tool calls of a conversation, in a form that the model's chat template renders.

Clients send the arguments of a call as a string that contains JSON. Most templates need an object, some need the
string, and many do not support calls: they drop a call without an error, or fail on a message without content.
Templates do not declare which form they read, so it is detected by rendering a probe, as llama.cpp does.

For a template without calls, a call is written as JSON into the content of its message. For a template without the role
`tool`, a result becomes a user message that contains JSON. Both use llama.cpp's keys. So no call and no result is
dropped without an error.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

from kvcellar.errors import BadRequest
from kvcellar.text.conversation import image_parts, texts
from kvcellar.values import no_number

Message = dict[str, Any]
Trial = Callable[[list[Message]], str]  # the template's output for these messages; "" if it fails
Copy = Callable[[Any, str], Any]  # copies a JSON value at this place in the request, within the caps


class Arguments(Enum):
    """How a template reads the arguments of a call."""

    OBJECT = "as an object"
    STRING = "as a string that holds JSON"
    NONE = "not at all: it has no calls"


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form that a template reads. `blank`: calls need an empty content; `results`: it has the role `tool`."""

    arguments: Arguments
    blank: bool
    results: bool

    def fit(self, messages: Sequence[Message], copy: Copy) -> list[Message]:
        """The messages with their calls and results in the form that this template reads.

        Raises `BadRequest` for arguments that are nested too deep.
        """
        fitted: list[Message] = []
        joinable = False  # whether the last message of `fitted` was made from results
        for index, message in enumerate(messages):
            result = message["role"] == "tool" and not self.results
            if result and joinable:
                fitted[-1]["content"] = _together(fitted[-1]["content"], _result(message))
            elif result:
                fitted.append({"role": "user", "content": _result(message)})
            else:
                fitted.append(self._with_calls(message, f"messages[{index}].tool_calls", copy))
            joinable = result
        return fitted

    def _with_calls(self, message: Message, where: str, copy: Copy) -> Message:
        if not message.get("tool_calls"):
            return message
        calls: list[Message] = [
            with_arguments(call, self.arguments, f"{where}[{n}].function.arguments", copy)
            for n, call in enumerate(message["tool_calls"])
        ]
        if self.arguments is not Arguments.NONE:
            return {**({"content": ""} if self.blank else {}), **message, "tool_calls": calls}
        text = _json({"tool_calls": [_flat(call) for call in calls]})
        return {**{k: v for k, v in message.items() if k != "tool_calls"}, "content": _after(message, text)}


def probe(trial: Trial, content: Callable[[str], Any]) -> CallForm:
    """The form that the template called by `trial` reads. `content(text)` is a message content with that text."""
    user = {"role": "user", "content": content("probe")}
    for arguments in (Arguments.OBJECT, Arguments.STRING):
        for blank in (False, True):
            call = with_arguments(_PROBE, arguments, "", lambda value, where: value)
            asking = {"role": "assistant", "tool_calls": [call], **({"content": content("")} if blank else {})}
            shown = trial([user, asking]).lower()
            if "probe_name" in shown and "probe_value" in shown and "'probe_key'" not in shown:  # not a Python repr
                return CallForm(arguments, blank, _renders_results(trial, [user, asking], content))
    written = {"role": "assistant", "content": content("probe_name")}
    return CallForm(Arguments.NONE, False, _renders_results(trial, [user, written], content))


def with_arguments(call: Message, form: Arguments, where: str, copy: Copy) -> Message:
    """The call with its arguments as an object, or as a string for `Arguments.STRING`.

    Arguments that are not a JSON object stay text: models produce such calls, and clients send them back.
    """
    function = _function(call)
    given: Any = function.get("arguments") or ""
    if form is not Arguments.STRING:
        given = _parsed(given, where, copy) if isinstance(given, str) else given
    elif not isinstance(given, str) or not given:
        given = _json(given or {})
    changed: Message = {**function, "arguments": given}
    return {**call, "function": changed} if function is not call else changed


def _renders_results(trial: Trial, before: list[Message], content: Callable[[str], Any]) -> bool:
    result = {"role": "tool", "name": "probe_name", "tool_call_id": _PROBE["id"], "content": content("probe_result")}
    return "probe_result" in trial([*before, result]).lower()


_PROBE: Message = {
    "id": "probe0123",  # nine letters and digits: some templates accept no others
    "type": "function",
    "function": {"name": "probe_name", "arguments": {"probe_key": "probe_value"}},
}


def _function(call: Message) -> Message:
    """The part of a call with its name: the field `function` (OpenAI), or the call itself (older transformers form)."""
    function = call.get("function")
    return cast("Message", function) if isinstance(function, dict) else call


def _parsed(text: str, where: str, copy: Copy) -> Any:
    try:
        value = json.loads(text or "{}", parse_constant=no_number)
    except RecursionError:
        raise BadRequest(f"{where} is nested too deep", "messages") from None
    except ValueError:
        return text
    return copy(value, where) if isinstance(value, dict) else text


def _flat(call: Message) -> Message:
    """The call as one flat object with name, arguments and id."""
    rest = {key: value for key, value in call.items() if key not in ("function", "type")}
    return {**_function(call), **rest} if _function(call) is not call else rest


def _result(message: Message) -> str | list[Any]:
    """What the user's message says; a list of parts if there are images in the result."""
    names = {"name": "tool", "tool_call_id": "tool_call_id"}
    named = {ours: message[theirs] for theirs, ours in names.items() if theirs in message}
    text = _json({"tool_response": {**named, "content": "\n".join(texts(message))}})
    return [{"type": "text", "text": text}, *images] if (images := image_parts(message)) else text


def _together(one: str | list[Any], other: str | list[Any]) -> str | list[Any]:
    if isinstance(one, str) and isinstance(other, str):
        return one + "\n" + other
    as_parts = [
        [{"type": "text", "text": content}] if isinstance(content, str) else content for content in (one, other)
    ]
    return [*as_parts[0], *as_parts[1]]


def _after(message: Message, text: str) -> str:
    before = "\n".join(texts(message))
    return f"{before}\n{text}" if before else text


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
