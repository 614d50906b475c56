"""models_list: the routes of OpenAI's API that list the models, those of the library too, loaded or not.

Clients of Anthropic's API read the same routes: the list and each model have its fields beside OpenAI's.
"""

import time
from datetime import UTC, datetime
from typing import Literal

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from kvcellar.serve.answers import Answer
from kvcellar.serve.http.sending import json_response
from kvcellar.serve.models.model_spec import ModelSpec
from kvcellar.serve.shared import Shared


class ModelFields(Answer, kw_only=True):
    """With the fields of OpenAI's API and of Anthropic's."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvcellar"
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    max_model_len: int | UnsetType = UNSET  # its context, where it is known before the model is loaded


class ModelList(Answer, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelFields]
    has_more: Literal[False] = False
    first_id: str | None
    last_id: str | None


class ModelsHandler:
    """A name may contain slashes."""

    def __init__(self, server: Shared) -> None:
        self._server = server
        self._created = int(time.time())

    async def list(self, request: Request) -> Response:
        models = await self._server.threads.run("models", self._server.host.all)
        data = [self._model(one) for one in models]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return json_response(ModelList(data=data, first_id=first, last_id=last))

    async def get(self, request: Request) -> Response:
        name = request.path_params["name"]
        return json_response(
            self._model(await self._server.threads.run("models", lambda: self._server.host.find(name)))
        )

    def _model(self, spec: ModelSpec) -> ModelFields:
        return ModelFields(
            id=spec.name,
            created=self._created,
            display_name=spec.name,
            created_at=datetime.fromtimestamp(self._created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            max_model_len=UNSET if spec.context is None else spec.context,
        )
