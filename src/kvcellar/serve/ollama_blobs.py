"""ollama_blobs: Ollama's route for the files that a model is created from.

A file is written to the library as it arrives: at most `PART` bytes and one part more of it are in memory. What is not
whole when the client leaves, or the server stops, is removed.
"""

import logging
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from kvcellar.library.uploads import Upload, Uploads, UploadsFull
from kvcellar.serve.api_errors import ApiError
from kvcellar.serve.body_parts import next_part
from kvcellar.serve.shared import Shared

log = logging.getLogger("kvcellar.serve")

PART = 2**20  # bytes that are written at once


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
