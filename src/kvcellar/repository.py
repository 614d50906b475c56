"""repository: names of models on a hub, `owner/name` with an optional `@revision`, and which of their files are used.

`library/hub.py` fetches such a model into the local Hugging Face cache, where `engine/models/weights/find.py` finds it.
"""

import re
from dataclasses import dataclass

from kvcellar.errors import BadRequest, shown

MAIN = "main"  # the revision of a name without one
_PART = r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?:{_PART}/)?{_PART}", re.ASCII)
_REVISION = re.compile(r"[\w.+-]+(?:/[\w.+-]+)*", re.ASCII)  # as `main`, `v1.0`, `refs/pr/3`, or a commit
_MOST_REVISION = 200  # characters
_SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".txt", ".tiktoken", ".vocab")
_BELOW = re.compile(r"additional_chat_templates/[^/]+\.jinja")  # what is used of directories


@dataclass(frozen=True, slots=True)
class Repository:
    """A model on a hub, at one revision: a branch, a tag or a commit."""

    name: str
    revision: str = MAIN

    @classmethod
    def parse(cls, text: str) -> "Repository":
        """Raises `BadRequest` for what is no name, or no revision."""
        name, at, revision = text.partition("@")
        if not _NAME.fullmatch(name) or "--" in name or ".." in name or name.endswith(".git"):
            raise BadRequest(
                f"{shown(text)} is not the name of a model: that is owner/name, or owner/name@revision, of letters, "
                f"digits, - _ and .",
                "model",
            )
        return cls(name, _checked(revision)) if at else cls(name)

    def at(self, revision: str | None) -> "Repository":
        """This model at another revision; None: as it is. Raises `BadRequest`, also if both name one, and differ."""
        if revision is None or revision == self.revision:
            return self
        if self.revision != MAIN:
            raise BadRequest(f"{self} names a revision already, and revision is {shown(revision)}", "revision")
        return Repository(self.name, _checked(revision))

    def __str__(self) -> str:
        return self.name if self.revision == MAIN else f"{self.name}@{self.revision}"


def _checked(revision: str) -> str:
    """A revision that is also a relative path of the cache. Raises `BadRequest`."""
    parts = revision.split("/")
    if len(revision) > _MOST_REVISION or not _REVISION.fullmatch(revision) or {".", ".."} & set(parts):
        raise BadRequest(f"{shown(revision)} is not a revision: that is a branch, a tag or a commit", "revision")
    return revision


def is_used(path: str) -> bool:
    """Whether a file of a repository is one that a model is loaded from: weights as safetensors, configs, the
    tokenizer and chat templates. `consolidated.safetensors` has the same weights once more, in another form."""
    if "/" in path:
        return _BELOW.fullmatch(path) is not None
    return path.endswith(_SUFFIXES) and not path.startswith("consolidated")
