"""library_routes: routes of Ollama's API that change the library: create, copy, delete, pull.

The middleware lets them pass with an admin key only, or, where no keys are set, on a loopback address. No route reads a
path of this machine.

A file that a model is created from is written to the library as it arrives: at most `PART` bytes and one part more of
it are in memory. What is not whole when the client leaves, or the server stops, is removed.

Always true of long work on a thread, whose progress is sent as lines of JSON, as Ollama does:
  * one such work runs at a time on a server; others wait;
  * if the client leaves, the next report of progress ends the work.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import Literal

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from kvcellar.errors import BadRequest, KvcellarError, ModelNotFound
from kvcellar.library import hub
from kvcellar.library.create import create
from kvcellar.library.library import Library
from kvcellar.library.modelfile import Command, Modelfile
from kvcellar.library.names import ModelName
from kvcellar.library.parameters import from_json
from kvcellar.library.uploads import Upload, Uploads, UploadsFull, check_names
from kvcellar.progress import Listener, Progress, listening
from kvcellar.serve.answers import Answer
from kvcellar.serve.generation.writer import json_line
from kvcellar.serve.http.api_errors import ApiError, ClientDisconnected, OllamaError, api_error
from kvcellar.serve.http.body import next_part
from kvcellar.serve.http.reader_threads import ReaderThreads
from kvcellar.serve.http.sending import HeldStream, json_response
from kvcellar.serve.models.failed_loads import without_paths
from kvcellar.serve.models.model_spec import ModelSpec, listed, not_served
from kvcellar.serve.models.model_use import read_body
from kvcellar.serve.ollama.fields import CopyBody, CreateModelBody, NamedBody, PullBody
from kvcellar.serve.operation import NDJSON
from kvcellar.serve.shared import Shared

log = logging.getLogger("kvcellar.serve")

SECONDS = 0.1  # between two lines of one stage
PART = 2**20  # bytes that are written at once
UPLOADED = "uploaded files"  # the value of FROM, or of ADAPTER
Work = Callable[[Listener], None]  # calls the listener, or `progress.report`


class ProgressLine(Answer):
    status: str  # the last line is `success`, or an error
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET


class Succeeded(Answer):
    status: Literal["success"] = "success"


ProgressEvent = ProgressLine | OllamaError


class Run(AbstractContextManager["Run"]):
    """One work, on the thread for long ones, whose reports are lines. Leaving the block ends it, at its next report."""

    def __init__(self, threads: ReaderThreads, work: Work) -> None:
        self._loop, self._work = asyncio.get_running_loop(), work
        self._lines: asyncio.Queue[ProgressLine | None] = asyncio.Queue()
        self._abandoned, self._last, self._stage = False, 0.0, ""
        self.error: ApiError | None = None
        threads.begin(self._run)

    def __exit__(self, *_: object) -> None:
        self._abandoned = True

    async def lines(self) -> AsyncIterator[bytes]:
        """A line for each report, then one with success or the error."""
        while (line := await self._lines.get()) is not None:
            yield json_line(line)
        yield json_line(Succeeded() if self.error is None else OllamaError.of_error(self.error))

    async def result(self) -> None:
        """Its end. Raises `ApiError`."""
        async for _ in self.lines():
            pass
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            with listening(self.report):
                self.report(Progress("starting"))
                self._work(self.report)
        except ClientDisconnected:
            pass
        except BaseException as error:  # noqa: BLE001 - returned to the client; a panic of compiled code, too
            self.error = failure(error)
        self._post(None)

    def report(self, progress: Progress) -> None:
        """May be called from any thread."""
        if self._abandoned:
            raise ClientDisconnected
        now = time.monotonic()
        if progress.stage == self._stage and progress.done < progress.total and now < self._last + SECONDS:
            return
        self._last, self._stage = now, progress.stage
        counts = (progress.total, progress.done) if progress.total else ()
        self._post(ProgressLine(progress.stage, *counts))

    def _post(self, line: ProgressLine | None) -> None:
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._lines.put_nowait, line)


def failure(error: BaseException) -> ApiError:
    """The error of such work. What kvcellar raises on purpose is for the client."""
    found = api_error(error)
    if found.status == 500 and isinstance(error, KvcellarError):
        return ApiError(400, without_paths(str(error)), code="not_possible")
    return replace(found, message=without_paths(found.message))


class BlobHandler:
    def __init__(self, server: Shared) -> None:
        library, settings = server.library, server.settings
        self._server = server
        self.uploads = None if library is None else Uploads(library.disk, settings.max_upload_bytes)

    async def __call__(self, request: Request) -> Response:
        threads, digest = self._server.threads, request.path_params["digest"]
        if (uploads := self.uploads) is None:
            raise ApiError(503, "this server has no library of models", code="no_library")
        if "origin" in request.headers:  # its type of content is one that a page may send to other servers
            raise ApiError(403, "web pages cannot upload files to this server", code="not_allowed")
        there = await threads.run("upload", lambda: uploads.has(digest))
        if request.method == "HEAD":
            return Response(status_code=200 if there else 404)
        if not there:
            await self._server.drain.run_before(self._receive(request, uploads, digest))
        return Response(status_code=200 if there else 201)

    async def _receive(self, request: Request, uploads: Uploads, digest: str) -> None:
        threads, size = self._server.threads, int(request.headers.get("content-length", "0"))
        upload: Upload | None = None

        def begin() -> Upload:
            nonlocal upload
            upload = uploads.begin(digest, size)
            return upload

        try:
            receiving = await threads.run("upload", begin)
            await self._write(request, receiving)
            await threads.run("upload", receiving.finish)
        except UploadsFull as error:
            raise ApiError(413, str(error), code="uploads_full") from error
        except OSError as error:  # a full disk, for one
            log.exception("a file that was uploaded cannot be stored")
            message = "the file cannot be stored now; the log of the server has the reason"
            raise ApiError(507, message, code="not_stored") from error
        finally:
            threads.end_upload(lambda: upload and upload.close())

    async def _write(self, request: Request, upload: Upload) -> None:
        parts, seconds = request.stream(), self._server.settings.body_seconds
        buffer = bytearray()
        while (part := await next_part(parts, seconds, "file")) is not None:
            buffer += part
            if len(buffer) >= PART:
                await self._server.threads.run("upload", partial(upload.write, bytes(buffer)))
                buffer.clear()
        await self._server.threads.run("upload", partial(upload.write, bytes(buffer)))


class LibraryHandler:
    def __init__(self, server: Shared, uploads: Uploads | None) -> None:
        self._server, self._uploads = server, uploads

    @property
    def _library(self) -> Library:
        if (library := self._server.library) is None:
            raise ApiError(503, "this server has no library of models", code="no_library")
        return library

    async def copy(self, request: Request) -> Response:
        body, library = await read_body(self._server, request, CopyBody), self._library

        def work() -> None:
            name = self._owned(body.source).name
            try:
                library.copy(name, body.destination)
            except ModelNotFound as error:  # removed meanwhile
                raise not_served(name) from error

        await self._server.threads.run("library", work)
        return Response()

    async def delete(self, request: Request) -> Response:
        body, library = await read_body(self._server, request, NamedBody), self._library

        name = await self._server.threads.run("library", lambda: self._removed(library, body.named))
        self._server.host.unload(name)
        return Response()

    def _removed(self, library: Library, name: str) -> str:
        """Remove a model, which may be damaged. Returns its name as it is listed."""
        if self._server.host.fixed(name):
            self._owned(name)
        try:
            return listed(library.remove(name))
        except (ModelNotFound, BadRequest, FileNotFoundError) as error:
            raise not_served(name) from error

    def _owned(self, name: str) -> ModelSpec:
        """A model of the library. Raises `ModelNotFound` and `ApiError`."""
        if not (spec := self._server.host.find(name)).id:
            raise ApiError(400, f"the model {spec.name} is not in the library of this server", "model")
        return spec

    async def create(self, request: Request) -> Response:
        body, library = await read_body(self._server, request, CreateModelBody), self._library
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
        body = await read_body(self._server, request, PullBody)
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
        run = Run(self._server.threads, work)
        if stream is not False:
            return HeldStream(run.lines(), run, media_type=NDJSON)
        with run:
            await run.result()
        return json_response(Succeeded())


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
