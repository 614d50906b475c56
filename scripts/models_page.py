"""Test every causal type of the installed transformers and write docs/models.md: `python -m scripts.models_page`.

A tiny random model of each type is served and verified as `kvcellar verify` does. For those that work, the steps are
recorded as an engine does it, and bits compared, in bfloat16. With types as arguments, their rows are printed, and
nothing is written. It needs a C++ compiler.

`--images` makes the section on images (`images_section`) and leaves the rest as it is; with types after it, only their
rows are made again.
"""

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvcellar.engine.load.recorded import record_steps
from kvcellar.engine.load.settings import Settings
from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.engine.models.weights.packing import pack_model
from kvcellar.engine.recording.recorded_kernel import StepKernel
from kvcellar.errors import ModelRefused
from kvcellar.kernels.compiled import NotCompiled
from kvcellar.memory.attention.choose import backends
from kvcellar.verify.bits import same_bits
from kvcellar.verify.run import Report, verify
from scripts.images_section import HEADING, check_type, ordered, rows_of
from scripts.images_section import render as render_images
from tests.zoo import ARCHS
from tests.zoo_test_support.images import TYPES as IMAGE_TYPES
from tests.zoo_test_support.sweep import NO_MODEL, of_type

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
TOKENS = 48  # of the longest text: far beyond the windows, chunks and blocks of tiny models

HEAD = """\
# Which models work

*Made by `make docs`, with transformers {version}. Tests repeat a sample of it.*

Every type of causal language model in transformers, each as a tiny random network in float32, loaded as any model is
and checked as `kvcellar verify` does. Your model may have another configuration than the tiny one: `kvcellar doctor`
prints how it is served, and `kvcellar verify` whether completions from memory equal those computed from the start.
The columns *steps* and *same bits* are for bfloat16 on a CPU with compiled kernels: whether a step is replayed by the
compiled loop or run by the model's modules, and whether the logits of a row are the same bits alone, in batches, in
chunks, from a fork and as drafts.

**{works} of the {built} types that can be built work: {share:.1%}.**

| | types |
| --- | --- |
| work *flat*: all sequences in one forward, through our attention | {flat} |
| work *solo*: one sequence per forward, through their own attention | {solo} |
| refused when they are loaded, with the reason | {refused} |
| wrong: served, and a check fails | {wrong} |
| not tested: there is no tiny model of them | {untested} |
| flat, and steps are recorded | {recorded} |
| flat, and a row has the same bits in any batch | {same} |
"""


@dataclass(frozen=True, slots=True)
class Row:
    """How a type is served, `why` if not flat, and what a type that works does not support (`except_for`)."""

    model_type: str
    how: Literal["flat", "solo", "refused", "wrong", "not tested"]
    why: str = ""
    except_for: tuple[str, ...] = ()
    modules: str | None = None  # why a step is run by the model's modules; None: it is recorded, or not served
    differs: str | None = None  # where bits depend on what a row is computed with; None: nowhere, or not served

    @property
    def works(self) -> bool:
        return self.how in ("flat", "solo")

    def __str__(self) -> str:
        note = "; ".join(self.except_for) if self.works else self.why
        return f"| {self.model_type} | {self.how} |{self._columns()}| {note.replace('|', '/')} |"

    def _columns(self) -> str:
        if not self.works:
            return " | "
        return f" {'modules' if self.modules else 'recorded'} | {'no' if self.differs else 'yes'} "


def check(model_type: str) -> Row:
    """Build a tiny model of the type and run every check on it."""
    if model_type in NO_MODEL:
        return Row(model_type, "not tested", NO_MODEL[model_type])
    try:
        guest = build_guest(_tiny(model_type), backends())
    except ModelRefused as refusal:
        return Row(model_type, "refused", _plainly(str(refusal)))
    report = verify(guest, tokens=TOKENS, quality=False)
    if not report.holds:
        return Row(model_type, "wrong", "failed checks: " + ", ".join(check.name for check in report.broken))
    modules, differs = steps_and_bits(model_type)
    how = "flat" if guest.mode == "flat" else "solo"
    return Row(model_type, how, _plainly(guest.refused or ""), tuple(_exceptions(report)), modules, differs)


def steps_and_bits(model_type: str) -> tuple[str | None, str | None]:
    """Why steps of a tiny bfloat16 model are run by its modules, and where bits differ; None for neither."""
    model = _tiny(model_type)
    torch.nn.Module.to(model, torch.bfloat16)  # transformers types its own `to` wrongly
    pack_model(model)
    try:
        guest = build_guest(model, backends())
    except ModelRefused as refusal:
        refused = f"in bfloat16: {_plainly(str(refusal))}"
        return refused, refused
    record_steps(guest, Settings(record="auto"))
    guest.recording = None  # it has the bits of the modules, whose order of sums is watched
    modules = None if guest.not_recorded is None else _plainly(guest.not_recorded)
    return modules, _difference(guest)


def _difference(guest: Guest) -> str | None:
    for way in same_bits(guest, seed=0):
        if not way.holds:
            where = way.failed or way.first or "what modules alone do not show"
            return re.sub(r"[\w.]*?(\w+) \((\w+)\)", r"\1", _plainly(where))
    return None


def _tiny(model_type: str) -> transformers.PreTrainedModel:
    known = [arch for arch in ARCHS.values() if arch.model_type == model_type]
    with silence_transformers():
        return known[0].build() if known else of_type(model_type)


def _exceptions(report: Report) -> Iterable[str]:
    """What a model that works does not support. Having no windows or no recurrent layers is no exception."""
    for check in report.checks:
        if check.note and (check.outcome == "holds" or check.name == "context shift"):
            yield f"{check.name}: {_plainly(check.note)}"


def _plainly(reason: str) -> str:
    """The reason without numbers that differ between machines, and without names that differ between types."""
    for pattern, plain in (
        (r"^\w+ cannot be served: ", ""),
        (r"^not supported, later tokens are computed again: ", "by recomputing, because "),
        (r" \((off by |)[\d.]+e[+-]\d+( is allowed|)\)", ""),
        (r"( by|;)? \d\.\d?e?[\d.]*e?[+-]\d+", ""),
        (r" by \d+e[+-]\d+", ""),
        (r" \d+ positions further on", " further on"),
        (r"layer \d+", "a layer"),
        (r"\w+(Attention|Model|Layer)\b", "a module"),
        (r"\s+", " "),
    ):
        reason = re.sub(pattern, plain, reason)
    return reason.strip()


def render(rows: Sequence[Row]) -> str:
    """The whole page."""
    counts = {how: sum(row.how == how for row in rows) for how in ("flat", "solo", "refused", "wrong", "not tested")}
    works, built = counts["flat"] + counts["solo"], len(rows) - counts["not tested"]
    flat = [row for row in rows if row.how == "flat"]
    parts = [
        HEAD.format(
            version=transformers.__version__,
            works=works,
            built=built,
            share=works / max(1, built),
            untested=counts["not tested"],
            recorded=sum(row.modules is None for row in flat),
            same=sum(row.differs is None for row in flat),
            **{how: counts[how] for how in ("flat", "solo", "refused", "wrong")},
        )
    ]
    exceptions: dict[str, list[str]] = {}
    for row in rows:
        for exception in row.except_for:
            exceptions.setdefault(exception, []).append(row.model_type)
    parts += _grouped("Refused, and why", _by_reason(row for row in rows if row.how == "refused"))
    parts += _grouped("Wrong", _by_reason(row for row in rows if row.how == "wrong"))
    parts += _grouped("Not tested, and why", _by_reason(row for row in rows if row.how == "not tested"))
    parts += _grouped("Solo, and why not flat", _by_reason(row for row in rows if row.how == "solo"))
    parts += _grouped("Exceptions", exceptions)
    parts += _grouped("Flat, and steps run by modules, because", _by_reason(flat, "modules"))
    parts += _grouped("Where bits differ, of those that are flat", _by_reason(flat, "differs"))
    parts += ["## Every type\n", "| type | served | steps | same bits | except, or why not |\n" + "| --- " * 5 + "|"]
    return "\n".join([*parts, *map(str, rows)]) + "\n"


def _by_reason(rows: Iterable[Row], of: Literal["why", "modules", "differs"] = "why") -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in rows:
        reason = {"why": row.why, "modules": row.modules, "differs": row.differs}[of]
        if reason is not None:
            found.setdefault(reason, []).append(row.model_type)
    return found


def _grouped(title: str, reasons: Mapping[str, Sequence[str]]) -> list[str]:
    """A section of reasons, the most frequent one first; empty without reasons."""
    if not reasons:
        return []
    lines = [
        f"- {why} ({len(types)}): {', '.join(types)}"
        for why, types in sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
    return [f"## {title}\n", *lines, ""]


def write_images(names: Sequence[str]) -> None:
    text, _, section = PAGE.read_text().partition(HEADING)
    rows = rows_of(section)
    for number, model_type in enumerate(names or IMAGE_TYPES, start=1):
        rows[model_type] = check_type(model_type)
        print(f"{number} {rows[model_type]}", file=sys.stderr, flush=True)
        PAGE.write_text(f"{text.rstrip()}\n\n{render_images(ordered(rows))}")


def main(names: Sequence[str]) -> int:
    torch.set_num_threads(1)
    if names[:1] == ["--images"]:
        write_images(names[1:])
        return 0
    try:
        StepKernel(os.environ)
    except NotCompiled as error:
        print(f"The page needs compiled kernels: {error}", file=sys.stderr)
        return 1
    rows: list[Row] = []
    for number, model_type in enumerate(names or TYPES, start=1):
        rows.append(check(model_type))
        if names:
            print(rows[-1])
        else:
            print(f"{number}/{len(TYPES)} {rows[-1]}", file=sys.stderr, flush=True)
    if not names:
        _, heading, section = PAGE.read_text().partition(HEADING)
        PAGE.write_text(f"{render(rows)}{heading}{section}")
        print(f"wrote docs/{PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
