"""ollama_library: routes of Ollama's API that change the library: create, copy, delete, pull.

The middleware lets them pass with an admin key only, or, where no keys are set, on a loopback address. No route reads a
path of this machine.
"""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from kvcellar.errors import BadRequest, ModelNotFound
from kvcellar.library import hub
from kvcellar.library.create import create
from kvcellar.library.library import Library
from kvcellar.library.modelfile import Command, Modelfile
from kvcellar.library.names import ModelName
from kvcellar.library.parameters import from_json
from kvcellar.library.uploads import Uploads, check_names
from kvcellar.progress import Listener
from kvcellar.serve.api_errors import ApiError
from kvcellar.serve.library_models import listed
from kvcellar.serve.ollama import answer, read
from kvcellar.serve.ollama_blobs import BlobHandler
from kvcellar.serve.ollama_fields import CopyBody, CreateModelBody, NamedBody, PullBody
from kvcellar.serve.progress_lines import Work, lines, result
from kvcellar.serve.servable import Servable, not_served
from kvcellar.serve.shared import Shared

NDJSON = "application/x-ndjson"
UPLOADED = "uploaded files"  # the value of FROM, or of ADAPTER


def library_routes(server: Shared) -> list[Route]:
    blobs = BlobHandler(server)
    handler = LibraryHandler(server, blobs.uploads)
    return [
        Route("/api/create", handler.create, methods=["POST"]),
        Route("/api/copy", handler.copy, methods=["POST"]),
        Route("/api/delete", handler.delete, methods=["DELETE"]),
        Route("/api/pull", handler.pull, methods=["POST"]),
        Route("/api/push", handler.push, methods=["POST"]),
        Route("/api/blobs/{digest}", blobs.__call__, methods=["HEAD", "POST"]),
    ]


class LibraryHandler:
    def __init__(self, server: Shared, uploads: Uploads | None) -> None:
        self._server, self._uploads = server, uploads

    @property
    def _library(self) -> Library:
        if (library := self._server.library) is None:
            raise ApiError(503, "this server has no library of models", code="no_library")
        return library

    async def copy(self, request: Request) -> Response:
        body, library = await read(self._server, request, CopyBody), self._library

        def work() -> None:
            name = self._owned(body.source).name
            try:
                library.copy(name, body.destination)
            except ModelNotFound as error:  # removed meanwhile
                raise not_served(name) from error

        await self._server.threads.run("library", work)
        return Response()

    async def delete(self, request: Request) -> Response:
        body, library = await read(self._server, request, NamedBody), self._library

        name = await self._server.threads.run("library", lambda: self._removed(library, body.named))
        self._server.host.unload(name)
        return Response()

    def _removed(self, library: Library, name: str) -> str:
        """Remove a model, which may be damaged. Returns its name as it is listed."""
        if self._server.host.fixed(name) is not None:
            self._owned(name)
        try:
            return listed(library.remove(name))
        except (ModelNotFound, BadRequest, FileNotFoundError) as error:
            raise not_served(name) from error

    def _owned(self, name: str) -> Servable:
        """A model of the library. Raises `ModelNotFound` and `ApiError`."""
        if not (servable := self._server.host.find(name)).id:
            raise ApiError(400, f"the model {servable.name} is not in the library of this server", "model")
        return servable

    async def create(self, request: Request) -> Response:
        body, library = await read(self._server, request, CreateModelBody), self._library
        tools = self._server.tools
        if tools is None or (uploads := self._uploads) is None:
            raise ApiError(503, "this server cannot create models", code="no_library")
        name, modelfile = str(ModelName.parse(body.named)), modelfile_of(body)

        files, adapters = body.files, body.adapters
        kinds = body.quantize, body.draft_quantize

        def work(_: Listener) -> None:
            with uploads.placed(files, adapters) as given:
                create(library, name, modelfile, tools=tools(), given=given, quantize=kinds[0], draft_quantize=kinds[1])

        return await self._long(work, body.stream)

    async def pull(self, request: Request) -> Response:
        body = await read(self._server, request, PullBody)
        if not self._server.settings.allow_pull:
            raise ApiError(403, "this server does not download models", code="not_allowed")
        name = body.named

        def work(listener: Listener) -> None:
            hub.pull(name, progress=listener)

        return await self._long(work, body.stream)

    async def push(self, request: Request) -> Response:
        raise ApiError(400, "models cannot be pushed from this server", code="not_supported")

    async def _long(self, work: Work, stream: bool | None) -> Response:
        """Lines by default, as Ollama."""
        if stream is False:
            await result(self._server.threads, work)
            return answer({"status": "success"})
        return StreamingResponse(lines(self._server.threads, work), media_type=NDJSON)


def modelfile_of(body: CreateModelBody) -> Modelfile:
    """The Modelfile that a body describes. Raises `BadRequest`."""
    if bool(body.from_) == bool(body.files):
        raise BadRequest("either from is required, the name of a model, or files that were uploaded", "from")
    for files, param in ((body.files, "files"), (body.adapters, "adapters")):
        check_names(files or {}, param)
    texts: Sequence[tuple[str, str | None]] = (
        ("model", body.from_ or UPLOADED),
        ("adapter", UPLOADED if body.adapters else None),
        ("draft", body.draft),
        ("template", body.template),
        ("system", body.system),
        ("requires", body.requires),
    )
    licenses = [body.license] if isinstance(body.license, str) else body.license or []
    for message in body.messages or ():
        if message.role not in ("system", "user", "assistant"):
            raise BadRequest("the role of a message must be system, user or assistant", "messages")
    modelfile = Modelfile((
        *(Command(name, text) for name, text in texts if text),
        *from_json(body.parameters or {}),
        *(Command("license", text) for text in licenses),
        *(Command("message", f"{one.role}: {one.content}") for one in body.messages or ()),
    ))  # fmt: skip
    str(modelfile)  # /api/show and `kvcellar show` write it, so a value that no Modelfile can have is refused here
    return modelfile
