"""names: the names of models in the library: `[owner/]name[:tag]`.

The grammar is strict, because a name is also a path below the library: no part of a valid name leaves its directory or
is hidden. Names that differ in case only are the same name.
"""

import re
from dataclasses import dataclass

from kvcellar.errors import BadRequest, shown

LATEST = "latest"  # the tag of a name without one
SUFFIX = ".json"  # of the file of a manifest
EMBEDDED, SEEING = "embedded", "embedded-vision"
RESERVED = (EMBEDDED, SEEING)  # the models that come with kvcellar: one for text, and one that sees pictures
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", re.ASCII)
_FORM = (
    "[owner/]name[:tag], each part of at most 80 letters, digits, '.', '_' and '-', beginning with a letter or digit"
)


@dataclass(frozen=True, slots=True, order=True)
class ModelName:
    """A name of the library. `owner` is empty if there is none."""

    owner: str
    name: str
    tag: str

    @classmethod
    def parse(cls, text: str) -> "ModelName":
        """Raises `BadRequest` for what is no name of a model."""
        whole, colon, tag = text.partition(":")
        owner, slash, name = whole.rpartition("/")
        for part in (owner if slash else LATEST, name, tag if colon else LATEST):
            _check(text, part)
        found = cls(owner, name, tag or LATEST)
        if not owner and name.lower() in RESERVED:
            raise BadRequest(
                f"{name.lower()!r} is a model that comes with kvcellar; no model of the library has that name", "model"
            )
        return found

    @property
    def path(self) -> str:
        """Of the manifest, below the directory of manifests."""
        return "/".join((*((self.owner,) if self.owner else ()), self.name, self.tag + SUFFIX))

    def same(self, other: "ModelName") -> bool:
        """Whether both are one name."""
        return self.path.lower() == other.path.lower()

    def __str__(self) -> str:
        return f"{self.owner}/{self.name}:{self.tag}" if self.owner else f"{self.name}:{self.tag}"


def _check(text: str, part: str) -> None:
    if not _PART.fullmatch(part):
        raise BadRequest(f"{shown(text)} is not the name of a model: {_FORM}", "model")
    if ".." in part or part.endswith("."):
        raise BadRequest(f"{shown(text)} is not the name of a model: no part has '..' or ends in '.'", "model")
    if part.lower().endswith(SUFFIX):  # a manifest of `owner:x` would be where the directory of `owner/x.json` is
        raise BadRequest(f"{shown(text)} is not the name of a model: no part ends in {SUFFIX}", "model")
