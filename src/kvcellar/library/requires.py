"""requires: the lowest version of kvcellar that a model requires (REQUIRES)."""

import re

from kvcellar.errors import BadRequest, ModelRefused, shown
from kvcellar.version import __version__

_VERSION = re.compile(r"v?(\d{1,9})(?:\.(\d{1,9}))?(?:\.(\d{1,9}))?")


def required(text: str) -> str:
    """The version as it is stored. Raises `BadRequest` unless it is like 1, 1.2 or 1.2.3."""
    if (found := _VERSION.fullmatch(text)) is None:
        raise BadRequest(f"REQUIRES {shown(text)} is not a version of kvcellar, like {__version__}", "requires")
    return ".".join(part or "0" for part in found.groups())


def check_version(requires: str | None, version: str = __version__) -> None:
    """Raise `ModelRefused` if this kvcellar is older."""
    if requires is not None and _numbers(version) < _numbers(required(requires)):
        raise ModelRefused(f"the model requires kvcellar {requires}; this is {version}. Upgrade kvcellar")


def _numbers(version: str) -> tuple[int, ...]:
    found = [int(number) for number in re.findall(r"\d+", version)[:3]]
    return (*found, *[0] * (3 - len(found)))
