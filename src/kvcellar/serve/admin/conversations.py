"""conversations: the routes of named conversations, which requests continue with the field `conversation`.

A conversation belongs to the API key that it was created with; for other keys it does not exist.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from msgspec import UNSET, UnsetType
from pydantic import FailFast, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvcellar.frontend.conversations import ConversationInfo
from kvcellar.frontend.served_engine import NamedEngine
from kvcellar.frontend.transcript import Transcript
from kvcellar.serve.answers import Answer, Anything
from kvcellar.serve.generation import forms
from kvcellar.serve.generation.messages import MAX_MESSAGES, Message, StrictModel, template_messages
from kvcellar.serve.generation.namespaces import owner
from kvcellar.serve.http.api_errors import invalid
from kvcellar.serve.http.body import RequestBody, receive_json
from kvcellar.serve.http.json_text import json_chunks
from kvcellar.serve.http.parsing import Limits, parse_object, validated
from kvcellar.serve.http.sending import send_encoded, until_disconnected
from kvcellar.serve.openai.completions import one_prompt
from kvcellar.serve.shared import Shared
from kvcellar.text.conversation import Caps, checked

WHOLE = 4  # conversations that are sent at the same time
Work = Callable[[str, bytearray], Answer]  # of the owner and the body


class CreateBody(StrictModel):
    name: str  # 1 to 128 letters, digits, dots, hyphens and underscores; the first one is a letter or digit
    # messages that a chat begins with, as in `/v1/chat/completions`
    messages: Annotated[list[Message] | None, FailFast()] = Field(default=None, max_length=MAX_MESSAGES)
    # for a conversation without messages: the text or token ids it begins with
    prompt: Annotated[object, forms.of(forms.OnePrompt)] = None


class ForkBody(StrictModel):
    to: str  # the name of the second conversation


class RewindBody(StrictModel):
    turns: int = 1  # to discard


class ConversationFields(Answer, kw_only=True):
    object: Literal["conversation"] = "conversation"
    name: str
    kind: Literal["chat", "text"]
    model: str
    created_at: int
    changed_at: int
    turns: int
    messages_count: int
    tokens_count: int


class ConversationList(Answer):
    data: list[ConversationFields]
    object: Literal["list"] = "list"


class WholeConversation(ConversationFields):
    messages: Sequence[Anything] | UnsetType = UNSET  # of a chat, as templates read them
    token_ids: Iterable[int] | UnsetType = UNSET  # of a text


class DeletedConversation(Answer):
    name: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True


class ConversationsHandler:
    """All of a request but receiving its body is done on the server's threads."""

    def __init__(self, server: Shared) -> None:
        self._server = server

    @property
    def _engine(self) -> NamedEngine:
        return self._server.host.default

    async def index(self, request: Request) -> Response:
        def work(owner: str, body: bytearray) -> Answer:
            found = self._engine.conversations.list(owner=owner)
            return ConversationList(list(map(described, found)))

        return await self._run(request, work)

    async def create(self, request: Request) -> Response:
        return await self._run(request, self._create, status=201)

    async def delete(self, request: Request) -> Response:
        name = request.path_params["name"]

        def work(owner: str, body: bytearray) -> Answer:
            self._engine.conversations.delete(name, owner=owner)
            return DeletedConversation(name)

        return await self._run(request, work)

    async def fork(self, request: Request) -> Response:
        def work(owner: str, raw: bytearray) -> Answer:
            body = validated(ForkBody, self._fields(raw))
            return described(self._engine.conversations.fork(request.path_params["name"], body.to, owner=owner))

        return await self._run(request, work, status=201)

    async def rewind(self, request: Request) -> Response:
        def work(owner: str, raw: bytearray) -> Answer:
            body = validated(RewindBody, self._fields(raw))
            return described(self._engine.conversations.rewind(request.path_params["name"], body.turns, owner=owner))

        return await self._run(request, work)

    # -- inside -------------------------------------------------------------------------------------------------

    async def _run(self, request: Request, work: Work, *, status: int = 200) -> Response:
        server, body = self._server, RequestBody(self._server.bodies)
        try:
            if request.method == "POST":
                await server.drain.run_before(receive_json(request.scope, request.receive, server.settings, body))
            owned = partial(work, owner(request.scope), body.data)
            encoded = await server.threads.run("files", lambda: b"".join(json_chunks(owned())), body)
        finally:
            body.release()
        return Response(encoded, status, media_type="application/json")

    def _fields(self, raw: bytearray) -> dict[str, object]:
        return parse_object(raw, Limits(context=self._engine.model.context))

    def _create(self, owner: str, raw: bytearray) -> Answer:
        body = validated(CreateBody, self._fields(raw))
        if body.prompt is not None and body.messages is not None:
            raise invalid("prompt", "prompt cannot be sent with messages; send one of them")
        if body.prompt is not None:
            transcript = Transcript(chat=False, tokens=self._tokens(one_prompt(body.prompt)))
        else:
            messages = checked(template_messages(body.messages), Caps()) if body.messages else ()
            transcript = Transcript(chat=True, messages=messages)
        return described(self._engine.conversations.create(body.name, transcript, owner=owner))

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        model = self._engine.model
        if isinstance(prompt, str):
            return self._engine.encode(prompt, limit=model.context)
        for token in prompt:
            if not 0 <= token < model.vocab_size:
                raise invalid("prompt", f"the model has no token {token} of prompt")
        return prompt


class WholeHandler:
    """Returns a conversation with its text. An ASGI application.

    Always true: at most `WHOLE` encoded conversations are sent, or wait for clients that read slowly, at the same time.
    """

    def __init__(self, server: Shared) -> None:
        self._server = server
        self._sending = asyncio.Semaphore(WHOLE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnected(receive, self._respond(scope, send))

    async def _respond(self, scope: Scope, send: Send) -> None:
        server = self._server
        work = partial(self._encoded, scope["path_params"]["name"], owner(scope))
        async with self._sending:
            await send_encoded(send, await server.threads.run("files", work))

    def _encoded(self, name: str, owner: str) -> bytes:
        info, transcript = self._server.host.default.conversations.read(name, owner=owner)
        whole = WholeConversation(**_fields(info))
        if transcript.chat:
            whole.messages = transcript.messages
        else:
            whole.token_ids = iter(transcript.tokens)
        return b"".join(json_chunks(whole))


def described(info: ConversationInfo) -> ConversationFields:
    """Without the text."""
    return ConversationFields(**_fields(info))


def _fields(info: ConversationInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "kind": "chat" if info.chat else "text",
        "model": info.model,
        "created_at": int(info.created),
        "changed_at": int(info.changed),
        "turns": info.turns,
        "messages_count": info.messages,
        "tokens_count": info.tokens,
    }
