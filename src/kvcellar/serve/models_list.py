"""models_list: the routes of OpenAI's API that list the models, those of the library too, loaded or not.

Clients of Anthropic's API read the same routes: the list and each model have its fields beside OpenAI's.
"""

import time
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from kvcellar.serve.chat_request import Json
from kvcellar.serve.json_text import to_json
from kvcellar.serve.model_spec import ModelSpec
from kvcellar.serve.shared import Shared


class ModelsHandler:
    """A name may contain slashes."""

    def __init__(self, server: Shared) -> None:
        self._server = server
        self._created = int(time.time())

    async def list(self, request: Request) -> Response:
        models = await self._server.threads.run("models", self._server.host.all)
        data = list(map(self._model, models))
        ends: Json = {"first_id": models[0].name if data else None, "last_id": models[-1].name if data else None}
        return self._json({"object": "list", "data": data, "has_more": False} | ends)

    async def get(self, request: Request) -> Response:
        name = request.path_params["name"]
        return self._json(self._model(await self._server.threads.run("models", lambda: self._server.host.find(name))))

    def _model(self, spec: ModelSpec) -> Json:
        created = datetime.fromtimestamp(self._created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        fields: Json = {"id": spec.name, "object": "model", "created": self._created, "owned_by": "kvcellar"}
        fields |= {"type": "model", "display_name": spec.name, "created_at": created}
        return fields if spec.context is None else fields | {"max_model_len": spec.context}

    def _json(self, value: object) -> Response:
        return Response(to_json(value), media_type="application/json")
