"""manifest: what a model of the library consists of, as a file: canonical JSON without time stamps.

Always true: the same model has the same bytes, and its id is their sha256. A manifest that was read is not trusted: its
digests and paths are checked, so that none leads out of the library.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, convert, structs, to_builtins

from kvcellar.errors import KvcellarError
from kvcellar.values import no_number

FORMAT = 1
MOST_BYTES = 64 << 20
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PATH = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_FOLDER = re.compile(r"[0-9]{1,2}_[A-Za-z]{1,40}")


def is_file_name(text: str) -> bool:
    """Whether a file of a model may have this name."""
    return _PATH.fullmatch(text) is not None


def is_module_folder(text: str) -> bool:
    """Whether a folder of a model may have this name: those of sentence-transformers are like `1_Pooling`. None of them
    is that of a draft or of adapters."""
    return _FOLDER.fullmatch(text) is not None


def is_file_path(text: str) -> bool:
    """Whether a file of a model may have this path: a name, perhaps in one folder."""
    folder, slash, name = text.rpartition("/")
    return is_file_name(name) and (not slash or is_module_folder(folder))


def blob_name(digest: str) -> str:
    """The name of the file that has the content of a digest."""
    return digest.replace(":", "-")


class ManifestDamaged(KvcellarError):
    """The bytes are no manifest of this version."""


class File(Struct, frozen=True):
    """One file of a model: its path in the model directory, and its content by digest (`sha256:HEX`) and size."""

    path: str
    digest: str
    size: int

    @property
    def blob(self) -> str:
        return blob_name(self.digest)


class Part(Struct, frozen=True):
    """The files of one model directory, ordered by path."""

    files: tuple[File, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


class Message(Struct, frozen=True):
    """One message that precedes each conversation."""

    role: str
    content: str


class Manifest(Struct, frozen=True, kw_only=True):
    """A model of the library. `parameters` has fields of `SamplingParams`, and `context` and `draft_depth`."""

    model: Part
    draft: Part | None = None
    adapters: tuple[Part, ...] = ()
    parameters: Mapping[str, Any] = {}
    template: str | None = None
    system: str | None = None
    messages: tuple[Message, ...] = ()
    licenses: tuple[str, ...] = ()
    requires: str | None = None  # the lowest version of kvcellar that can run it
    source: str = ""  # FROM, as it was given
    quantized: str | None = None
    draft_quantized: str | None = None
    report: Mapping[str, Any] | None = None  # of the quantization

    @property
    def parts(self) -> dict[str, Part]:
        """Every part by its directory below that of the model, whose own is empty."""
        draft = {} if self.draft is None else {"draft": self.draft}
        return {"": self.model, **draft, **{f"adapters/{i}": part for i, part in enumerate(self.adapters)}}

    @property
    def files(self) -> dict[str, File]:
        """Every file by its path below the directory of the model."""
        return {f"{folder}/{file.path}".lstrip("/"): file for folder, part in self.parts.items() for file in part.files}

    @property
    def size(self) -> int:
        """Bytes of all files, of equal ones once."""
        return sum({file.digest: file.size for file in self.files.values()}.values())

    @property
    def id(self) -> str:
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def base_id(self) -> str:
        """Digest of model and draft alone: models of one base can share one network."""
        return hashlib.sha256(_canonical({"model": self.model, "draft": self.draft})).hexdigest()

    def to_bytes(self) -> bytes:
        return _canonical({"kvcellar": FORMAT, **structs.asdict(self)})

    @classmethod
    def from_bytes(cls, content: bytes) -> "Manifest":
        """Raises `ManifestDamaged`."""
        if len(content) > MOST_BYTES:
            raise ManifestDamaged(f"it has more than {MOST_BYTES} bytes")
        try:
            raw = json.loads(content, parse_constant=no_number)
            if raw["kvcellar"] != FORMAT:
                raise ManifestDamaged(f"it has version {raw['kvcellar']!r}; this kvcellar reads version {FORMAT}")
            found = convert(raw, cls)
            for part in found.parts.values():
                _check_part(part)
            same = found.to_bytes() == content
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ManifestDamaged(f"it is no manifest: {type(error).__name__}: {error}") from error
        if not same:
            raise ManifestDamaged("it is not as it is written")
        return found


def _canonical(raw: Mapping[str, Any]) -> bytes:
    plain = to_builtins(raw)
    return json.dumps(plain, sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False).encode() + b"\n"


def _check_part(part: Part) -> None:
    names = [file.path for file in part.files]
    if names != sorted(set(names)):
        raise ValueError("its files are not in order, or one occurs twice")
    for file in part.files:
        if not is_file_path(file.path) or not DIGEST.fullmatch(file.digest) or file.size < 0:
            raise ValueError(f"a file is {file}")
