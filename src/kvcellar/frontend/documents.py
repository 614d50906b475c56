"""documents: where a front end keeps what it has to remember: named conversations, responses, the tokens of replies.

In the remote store, if that is a Valkey or Redis server or a directory: then all front ends that have it continue what
any of them began. Otherwise in the directory of the store, where servers of this machine share them; or in memory.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, Unpack

from kvcellar.engine.load.settings import Settings, cipher_of, document_bytes, secret_of
from kvcellar.memory.tiers.archive import LEAST_FILES, MEMORY_BYTES, Archive, ArchiveOptions, DiskArchive, Forgets
from kvcellar.memory.tiers.codec import Cipher, Plain
from kvcellar.memory.tiers.objects import opening, server_url
from kvcellar.memory.tiers.remote_archive import RedisArchive

Kind = Literal["conversations", "responses", "replies"]
DIRECTORY = "file"
EACH = 16 << 10  # bytes for each document of a kind that forgets
SECONDS = 10.0  # that a call of a place takes at most


@dataclass(frozen=True, slots=True)
class Documents:
    """The place: a server, a directory, or, without either, memory. `cap` is on the bytes of each kind, of which one
    owner may have a `share`."""

    server: str | None = None
    directory: Path | None = None
    cap: int = MEMORY_BYTES
    share: float = 1.0
    cipher: Cipher = field(default_factory=Plain)
    secret: bytes = b""

    @property
    def durable(self) -> bool:
        return self.server is not None or self.directory is not None

    def forgets(self, seconds: float, own: int) -> Forgets:
        """What is dropped of one kind: as many documents are kept as have `EACH` bytes on the average."""
        return Forgets(seconds, own, max(LEAST_FILES, self.cap // EACH))

    def archive(self, kind: Kind, **options: Unpack[ArchiveOptions]) -> Archive:
        """Reads and writes nothing yet. Raises `BadRequest`."""
        made: ArchiveOptions = {"share": self.share, "cipher": self.cipher, "secret": self.secret, **options}
        if self.durable:
            made["seconds"] = SECONDS
        if self.directory is not None:
            return DiskArchive(self.directory / kind, self.cap, **made)
        if self.server is None:
            return Archive(self.cap, **made)
        with opening(self.server):
            return RedisArchive(self.server, f"kvcellar-{kind}-", self.cap, **made)


def documents_of(settings: Settings) -> Documents:
    """Those of engines with these settings."""
    about = partial(Documents, share=settings.tenant_share, cipher=cipher_of(settings), secret=secret_of(settings))
    remote = settings.store_remote or ""
    scheme, _, rest = remote.partition("://")
    if (server := server_url(remote)) is not None:
        return about(server=server, cap=document_bytes(settings.store_remote_bytes))
    if scheme == DIRECTORY:
        return about(directory=Path(rest), cap=document_bytes(settings.store_remote_bytes))
    if settings.store is not None:
        return about(directory=Path(settings.store), cap=document_bytes(settings.store_bytes))
    return about()
