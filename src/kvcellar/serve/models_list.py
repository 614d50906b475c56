"""models_list: the routes of OpenAI's API that list the models, those of the library too, loaded or not."""

import time

from starlette.requests import Request
from starlette.responses import Response

from kvcellar.serve.chat_request import Json
from kvcellar.serve.json_text import to_json
from kvcellar.serve.servable import Servable
from kvcellar.serve.shared import Shared


class ModelsHandler:
    """A name may contain slashes."""

    def __init__(self, server: Shared) -> None:
        self._server = server
        self._created = int(time.time())

    async def list(self, request: Request) -> Response:
        models = await self._server.threads.for_listing(self._server.host.all)
        return self._json({"object": "list", "data": list(map(self._model, models))})

    async def get(self, request: Request) -> Response:
        name = request.path_params["name"]
        return self._json(self._model(await self._server.threads.for_listing(lambda: self._server.host.find(name))))

    def _model(self, servable: Servable) -> Json:
        fields: Json = {"id": servable.name, "object": "model", "created": self._created, "owned_by": "kvcellar"}
        return fields if servable.context is None else fields | {"max_model_len": servable.context}

    def _json(self, value: object) -> Response:
        return Response(to_json(value), media_type="application/json")
