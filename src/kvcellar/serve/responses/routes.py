"""routes: responses that were kept, and the items that they were asked with, in pages as OpenAI's API has them."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from kvcellar.serve.answers import Answer
from kvcellar.serve.generation.namespaces import owner
from kvcellar.serve.http.api_errors import invalid, unsupported
from kvcellar.serve.http.json_text import printable, to_json
from kvcellar.serve.http.sending import json_response
from kvcellar.serve.responses.response_writer import DeletedResponse
from kvcellar.serve.responses.store import open_responses
from kvcellar.serve.shared import Shared

Json = dict[str, Any]
MOST, USUAL = 100, 20  # items of a page
ORDERS = ("asc", "desc")
PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


class InputItems(Answer):
    data: list[dict[str, Any]]  # as they were sent, each with `id`, `type` and, beside reasoning, `status`
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class KeptHandler:
    def __init__(self, server: Shared) -> None:
        settings = server.settings
        self._server = server
        self.store = open_responses(
            server.host.documents, bytes_of_key=settings.responses_bytes, seconds=settings.responses_seconds
        )

    async def get(self, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise unsupported("stream", "stream is not supported here; leave it out")
        work = partial(self.store.get, owner(request.scope), request.path_params["id"])
        kept = await self._server.threads.run("files", work)
        return Response(kept.response, media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        id, query = request.path_params["id"], request.query_params

        def work() -> bytes:  # the input may be as long as a body
            return to_json(page(id, self.store.get(owner(request.scope), id).input, query))

        return Response(await self._server.threads.run("files", work), media_type="application/json")

    async def delete(self, request: Request) -> Response:
        id = request.path_params["id"]
        await self._server.threads.run("files", partial(self.store.delete, owner(request.scope), id))
        return json_response(DeletedResponse(id))


def page(response: str, kept: bytes, query: Mapping[str, str]) -> InputItems:
    """A page of the items of the response with this id. Raises `ApiError` for a query that is invalid."""
    limit, order, after = _limit(query.get("limit")), query.get("order", "desc"), query.get("after")
    if order not in ORDERS:
        raise invalid("order", f"order must be asc or desc, not {printable(repr(order), 40)}")
    items, ids = list[Json](), set[str]()
    for at, item in enumerate(json.loads(kept)):
        found = _item(response, at, item)
        if found["id"] in ids:  # pages go on behind an id
            found["id"] = _made_id(response, at, found["type"])
        items.append(found)
        ids.add(found["id"])
    if order == "desc":
        items.reverse()
    begin = _behind(items, after)
    found = items[begin : begin + limit]
    first, last = (found[0]["id"], found[-1]["id"]) if found else (None, None)
    return InputItems(found, first, last, begin + limit < len(items))


def _limit(text: str | None) -> int:
    if text is None:
        return USUAL
    if not (text.isascii() and text.isdigit() and len(text) <= 3 and 1 <= int(text) <= MOST):
        raise invalid("limit", f"limit must be a number from 1 to {MOST}, not {printable(repr(text), 40)}")
    return int(text)


def _behind(items: Sequence[Json], after: str | None) -> int:
    if after is None:
        return 0
    for at, item in enumerate(items):
        if item["id"] == after:
            return at + 1
    raise invalid("after", f"after is {printable(repr(after), 80)}, which is no id of these items")


def _item(response: str, at: int, item: Json) -> Json:
    """As it was sent, with the fields that are never absent. Every item has an id, also one that was sent without."""
    kind = item.get("type", "message")
    own = item.get("id")
    id = own if isinstance(own, str) and own else _made_id(response, at, kind)
    found = {**item, "type": kind, "id": id}
    if kind == "message" and isinstance(item.get("content"), str):
        text = {"type": "output_text" if item["role"] == "assistant" else "input_text", "text": item["content"]}
        found["content"] = [text | ({"annotations": []} if item["role"] == "assistant" else {})]
    if kind != "reasoning":
        found.setdefault("status", "completed")
    return found


def _made_id(response: str, at: int, kind: str) -> str:
    return f"{PREFIXES[kind]}_{response.removeprefix('resp_')}_{at}"
