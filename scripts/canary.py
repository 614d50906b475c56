"""Test the architectures of `tests/zoo.py` with the installed transformers: `python -m scripts.canary [NAME ...]`.

Each architecture runs the timeline of its test. The table shows how it is served with the pinned release of
transformers and with the installed one. Exit code 1 if one is no longer served, or is wrong.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import transformers

from kvcellar.engine.models.build_guest import MODEL_ERRORS, build_guest
from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.errors import ModelRefused
from kvcellar.memory.attention.choose import backends
from tests.models.served import expected
from tests.models.timeline import BOUND, Timeline, seed_of
from tests.zoo import ARCHS

WIDTH = max(map(len, ARCHS))


@dataclass(frozen=True, slots=True)
class Found:
    """How an architecture is served, with the reason or the largest difference."""

    how: Literal["flat", "solo", "refused", "wrong"]
    note: str


def check(name: str) -> Found:
    try:
        with silence_transformers():
            model, reference = ARCHS[name].build(), ARCHS[name].build()
    except MODEL_ERRORS as error:
        return Found("refused", f"it cannot be built: {type(error).__name__}: {error}")
    try:
        guest = build_guest(model, backends())
    except ModelRefused as refusal:
        return Found("refused", str(refusal))
    timeline = Timeline(guest, reference, seed_of(name))
    try:
        timeline.play()
        worst = timeline.worst_difference()
    except (AssertionError, *MODEL_ERRORS) as error:
        return Found("wrong", f"{type(error).__name__}: {error}")
    if worst > BOUND:
        return Found("wrong", f"its logits differ by {worst:.1e}")
    return Found(guest.mode, guest.refused or f"its logits differ by {worst:.1e} at most")


def main(names: Sequence[str]) -> int:
    torch.set_num_threads(1)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    lost: list[str] = []
    for name in names or ARCHS:
        found, before = check(name), expected(name)
        broken = found.how == "wrong" or (found.how == "refused" and before != "refused")
        if broken:
            lost.append(name)
        mark = "LOST " if broken else "     " if found.how == before else "other"
        note = " ".join(found.note.split())[:160]
        print(f"{mark} {name:{WIDTH}} {before:7} -> {found.how:7} {note}", flush=True)
    print(f"{len(lost)} lost{': ' if lost else ''}{', '.join(lost)}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
