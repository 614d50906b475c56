"""repository: names of models on a hub, `owner/name` with an optional `@revision`, which of their files are used, and
which of those in a directory are its weights.

`library/hub.py` fetches such a model into the local Hugging Face cache, where `engine/models/weights/find.py` finds it.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kvcellar.errors import BadRequest, ModelRefused, shown

MAIN = "main"  # the revision of a name without one
_PART = r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?:{_PART}/)?{_PART}", re.ASCII)
_REVISION = re.compile(r"[\w.+-]+(?:/[\w.+-]+)*", re.ASCII)  # as `main`, `v1.0`, `refs/pr/3`, or a commit
_MOST_REVISION = 200  # characters
TEXTS = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".vocab")  # ends of configs, tokenizers and templates
MOST_TEXT = 256 << 20  # bytes of such a file
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MTP = "mtp.safetensors"  # of a model's MTP head, if that is not in the model's own files
MOST_INDEX = 64 << 20  # bytes
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
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
    return path.endswith((".safetensors", *TEXTS)) and not path.startswith("consolidated")


def weight_map(directory: Path) -> dict[str, str]:
    """The file of each tensor that the index lists; empty where there is one file of the usual name. Raises
    `ModelRefused` for an index that lists others than safetensors files of its directory, or where there is neither."""
    index = directory / INDEX
    if (directory / SINGLE).is_file():
        return {}
    if not index.is_file():
        raise ModelRefused(f"{directory} has neither {SINGLE} nor {INDEX}{pickled(directory)}")
    try:
        if (size := index.stat().st_size) > MOST_INDEX:
            raise ModelRefused(f"{index} has {size} bytes; {MOST_INDEX} are allowed")
        listed: Any = json.loads(index.read_bytes())["weight_map"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise ModelRefused(f"{index} is no index of weights files: {type(error).__name__}: {error}") from error
    files: dict[str, Any] = cast("dict[str, Any]", listed) if isinstance(listed, dict) else {}
    if not files or not all(isinstance(one, str) for one in files.values()):
        raise ModelRefused(f"{index} lists no weights files")
    for name in sorted(set(files.values())):
        if not name.endswith(".safetensors") or Path(name).name != name or "\\" in name or name.startswith("."):
            raise ModelRefused(f"{index} lists {shown(name)}, which is no safetensors file of its directory")
        if not (directory / name).is_file():
            raise ModelRefused(f"{index} lists {name}, which is missing. Copy the whole model again")
    return files


def pickled(directory: Path) -> str:
    """What to say about pickled weights in a directory without others."""
    names = sorted(file.name for file in directory.iterdir() if file.suffix in _PICKLED)
    if not names:
        return ""
    return f". {', '.join(names[:3])}: pickled weights can run code when they are read; convert them to safetensors"
