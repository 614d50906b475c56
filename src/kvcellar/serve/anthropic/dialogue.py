"""dialogue: messages of content blocks as those that chat templates render, and where breakpoints are.

A message of the user may begin with results of tools, which become messages of the role `tool`; the other blocks make
one message of the user behind them. Signatures of reasoning are not read: a client that sends messages of the assistant
decides what they contain anyway.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from kvcellar.serve.anthropic.fields import AnthropicTool, Block, Blocks, PromptBody
from kvcellar.serve.generation.field_names import Place
from kvcellar.serve.generation.messages import no_encoder
from kvcellar.serve.http.api_errors import ApiError, invalid, unsupported

TTL = {None: 300.0, "5m": 300.0, "1h": 3600.0}  # seconds
MAX_BREAKPOINTS = 4  # as Anthropic
HIDDEN = "redacted_thinking"  # reasoning that the client cannot read; this server writes none
_BLOCKS = TypeAdapter(Blocks)

Message = dict[str, Any]
Content = str | list[Message]
NO_IMAGES: Mapping[int, str] = {}


@dataclass(slots=True)
class Chat:
    """Messages in the form that `Engine.render` takes, and where in the body they are."""

    messages: list[Message] = field(default_factory=list[Message])
    places: list[Place] = field(default_factory=list[Place])
    # Ends of messages, each as a number of messages, behind which the client has set a breakpoint.
    breakpoints: list[int] = field(default_factory=list[int])
    ttls: list[float] = field(default_factory=list[float])  # of the breakpoints, seconds

    def add(self, message: Message, blocks: Sequence[Block], where: str, images: Mapping[int, str] = NO_IMAGES) -> None:
        """Append a message that was made of `blocks`."""
        self.messages.append(message)
        calls = [f"{where}[{number}].input" for number, block in enumerate(blocks) if block.type == "tool_use"]
        self.places.append(Place(where, calls, images))
        self.mark(blocks)

    def mark(self, blocks: Iterable[Block | AnthropicTool]) -> None:
        """Breakpoints of `blocks` stand behind the last message."""
        for block in blocks:
            if block.cache_control is not None:
                self.ttls.append(TTL[block.cache_control.ttl])
                if len(self.messages) not in self.breakpoints:
                    self.breakpoints.append(len(self.messages))
        if len(self.ttls) > MAX_BREAKPOINTS:
            raise invalid("cache_control", f"at most {MAX_BREAKPOINTS} blocks may have cache_control")


def chat_of(body: PromptBody) -> Chat:
    """The messages of a body. Raises `ApiError`."""
    chat = Chat()
    if body.system is not None and (text := _joined(body.system, "system")):
        chat.add({"role": "system", "content": text}, body.system, "system")
    chat.mark(body.tools or ())  # templates write tools into the system prompt, or before the first message
    for index, message in enumerate(body.messages):
        where = f"messages[{index}].content"
        match message.role:
            case "system":
                chat.add({"role": "system", "content": _joined(message.content, where)}, message.content, where)
            case "assistant":
                chat.add(_said(message.content, where), message.content, where)
            case "user":
                _add_user(chat, message.content, where)
    return chat


def tools_of(tools: Sequence[AnthropicTool] | None) -> list[dict[str, Any]] | None:
    """Tools in OpenAI's form, which templates render. Raises `ApiError` for those that run at Anthropic."""
    if not tools:
        return None
    found: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.type not in (None, "custom"):
            message = f"{where}.type is {tool.type!r}: such a tool runs at Anthropic; this server has only custom tools"
            raise unsupported(f"{where}.type", message)
        if tool.input_schema is None:
            raise ApiError(400, f"{where}.input_schema is required", f"{where}.input_schema", "missing_parameter")
        function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
        if tool.description is not None:
            function["description"] = tool.description
        if tool.strict is not None:
            function["strict"] = tool.strict
        found.append({"type": "function", "function": function})
    return found


def _add_user(chat: Chat, blocks: Sequence[Block], where: str) -> None:
    """Results first, then one message with the text."""
    own: dict[str, Block] = {}  # by place
    for number, block in enumerate(blocks):
        at = f"{where}[{number}]"
        match block.type:
            case "tool_result":
                if own:
                    raise invalid(at, f"{at} is a tool_result behind text; results come first in a message")
                content, images = _result(block, at)
                chat.add({"role": "tool", "tool_call_id": block.tool_use_id, "content": content}, [block], at, images)
            case "text" | "image":
                own[at] = block
            case _:
                raise _unsupported(block, at)
    if own:
        content, images = _content(own)
        chat.add({"role": "user", "content": content}, [*own.values()], where, images)
    elif not blocks:
        raise invalid(where, f"{where} is empty; a message needs a block")


def _result(block: Block, where: str) -> tuple[Content, Mapping[int, str]]:
    """The content of the message of a `tool_result`."""
    if block.tool_use_id is None:
        raise invalid(where, f"{where}.tool_use_id is required in a tool_result")
    given = _blocks(block.content or "", f"{where}.content")
    if block.is_error:
        first = given.pop(0).text if given and given[0].type == "text" else ""
        given.insert(0, Block(type="text", text=f"Error: {first}"))
    return _content({f"{where}.content[{number}]": one for number, one in enumerate(given)})


def _content(blocks: Mapping[str, Block]) -> tuple[Content, Mapping[int, str]]:
    """The content of a message of blocks, by place, that must be text or images, and where its images come from."""
    if all(block.type != "image" for block in blocks.values()):
        return "\n".join(_text(block, at) for at, block in blocks.items()), NO_IMAGES
    parts = [_image(block, at) if block.type == "image" else _text_part(block, at) for at, block in blocks.items()]
    images = {number: f"{at}.source" for number, (at, block) in enumerate(blocks.items()) if block.type == "image"}
    return parts, images


def _text_part(block: Block, where: str) -> Message:
    return {"type": "text", "text": _text(block, where)}


def _image(block: Block, where: str) -> Message:
    source = block.source
    found = None if source is None else source.data if source.type == "base64" else source.url
    if source is None or found is None:
        raise invalid(f"{where}.source", f"{where}.source must have data or a url")
    url = f"data:{source.media_type or 'image/*'};base64,{found}" if source.type == "base64" else found
    return {"type": "image", "image": url}


def _said(blocks: Sequence[Block], where: str) -> Message:
    """A message of the assistant."""
    message: Message = {"role": "assistant"}
    calls: list[Message] = []
    texts: list[str] = []
    thoughts: list[str] = []
    for number, block in enumerate(blocks):
        at = f"{where}[{number}]"
        match block.type:
            case "text":
                texts.append(_text(block, at))
            case "thinking":
                thoughts.append(block.thinking or "")
            case "tool_use":
                calls.append(_call(block, at))
            case _ if block.type != HIDDEN:
                raise _unsupported(block, at)
    if texts:
        message["content"] = "".join(texts)
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if len(message) == 1:
        message["content"] = ""
    return message


def _call(block: Block, where: str) -> Message:
    for name, value in (("id", block.id), ("name", block.name)):
        if not value:
            raise invalid(where, f"{where}.{name} is required in a tool_use")
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input or {}}}


def _joined(blocks: Sequence[Block], where: str) -> str:
    """The text of blocks that must be text."""
    return "\n".join(_text(block, f"{where}[{number}]") for number, block in enumerate(blocks))


def _text(block: Block, where: str) -> str:
    if block.type != "text":
        raise _unsupported(block, where)
    if block.text is None:
        raise invalid(where, f"{where}.text is required in a block of the type text")
    return block.text


def _blocks(value: object, where: str) -> list[Block]:
    try:
        return _BLOCKS.validate_python(value)
    except ValidationError:
        raise invalid(where, f"{where} must be a string, or an array of blocks of text and images") from None


def _unsupported(block: Block, where: str) -> ApiError:
    can = f"this server reads text, images of the user and of tools, and calls{no_encoder(block.type)}"
    message = f"{where} has the type {block.type!r}, which cannot stand here; {can}"
    return ApiError(400, message, where, "unsupported_content")
