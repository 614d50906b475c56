"""run: checks on this machine, with this model's weights, that logits computed with memory equal those without.

Each check (`checks`) runs operations on a memory of its own and compares every row of logits that it kept with the
model's own eager forward over the same tokens, which uses no cache. If a check does not apply to a model, its note is
the reason.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from kvcellar.engine.load.in_library import located
from kvcellar.engine.load.machine import threads_of
from kvcellar.engine.load.settings import Settings
from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import MODEL_ERRORS, Guest
from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.engine.models.input_limits import context_of
from kvcellar.engine.models.load import load
from kvcellar.engine.models.selftest import TOLERANCE, judged_as, worst
from kvcellar.engine.models.weights.packing import pack_model
from kvcellar.errors import BadRequest, KvcellarError
from kvcellar.memory.attention.choose import named
from kvcellar.verify.bits import SameBits, same_bits
from kvcellar.verify.checks import CHECKS, Check, NotApplicable
from kvcellar.verify.harness import CheckFailed, Harness, Setup
from kvcellar.verify.kv_quality import KvQuality, is_small, kv_quality

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Outcome = Literal["holds", "does not hold", "not applicable"]
EXACT = (torch.float32, torch.float64)  # in these the most likely tokens must be the same, too
TOKENS = 512  # default length of the longest text
SOLO = "solo"  # kind of layers that attend to all K/V through the model's own masks
LEAST = 8  # the fewest tokens that the checks need
TRIES = 3  # with different texts, in half precision, before a difference is reported
FAR = 1_000_003  # from the seed of a try to that of the next
WAYS = ("fp8", "int8", "int8+hadamard", "int4+hadamard")  # of storing K/V, whose divergence is reported
BITS = "bits"  # the name under which `watch` is called before rows are compared bit by bit
SAMPLE = 64  # tokens of the text on which it is measured


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check. `difference` is compared with `bound`, `largest` is the largest of any row; both are
    relative to max(1, max|logit|), and None if no row was compared or a logit was not finite.

    `other_text` counts the rows with another most likely token where the reference's two best logits differ by more
    than the bound. `note` is the reason why the check, or a part of it, does not apply or does not hold.
    """

    name: str
    description: str
    layers: tuple[str, ...]
    outcome: Outcome
    difference: float | None
    largest: float | None
    bound: float
    rows: int
    other_text: int
    note: str = ""

    def __str__(self) -> str:
        """The line to report if the check does not hold."""
        seen = (
            "" if self.largest is None else f"; logits differ by up to {self.largest:.1e}, {self.bound:.0e} is allowed"
        )
        text = f", and {self.other_text} of {self.rows} rows have another most likely token" if self.other_text else ""
        note = f": {self.note}" if self.note else ""
        return f"{self.name} ({', '.join(self.layers)}) {self.outcome}{note}{seen}{text}"


@dataclass(frozen=True, slots=True)
class Report:
    """The results for a model. `promised`: its dtype is one in which a difference is a defect of kvcellar."""

    name: str
    architecture: str
    parameters: int  # of the network that was loaded; of a `Guest`, those that are in no layer of our own
    dtype: str
    device: str
    mode: str
    layers: tuple[str, ...]
    tokens: int
    seed: int
    promised: bool
    checks: tuple[CheckResult, ...]
    kv_quality: tuple[KvQuality, ...]
    bits: tuple[SameBits, ...]  # reported, and not a part of `holds`

    @property
    def holds(self) -> bool:
        """Whether every check that applies holds."""
        return not self.broken

    @property
    def broken(self) -> tuple[CheckResult, ...]:
        return tuple(check for check in self.checks if check.outcome == "does not hold")

    @property
    def applied(self) -> tuple[CheckResult, ...]:
        return tuple(check for check in self.checks if check.outcome != "not applicable")

    def as_dict(self) -> dict[str, Any]:
        return {"holds": self.holds, **asdict(self)}


def verify(
    model: "Guest | PreTrainedModel | str | Path | None",
    settings: Settings | None = None,
    *,
    tokens: int = TOKENS,
    seed: int = 0,
    quality: bool | None = None,
    watch: Callable[[str], None] = lambda check: None,
) -> Report:
    """Run all checks with texts of up to `tokens` random tokens, drawn by `seed`.

    `watch` is called with the name of each check before it runs.

    Of `settings`, only dtype, device, weights, attention, pack and threads are used. `quality`: whether to also measure
    storing K/V in fewer bits; None: only for small models. Raises the errors of `load` and `build_guest`, and
    `BadRequest` for too few tokens or for a guest with quantised K/V, whose logits are expected to differ.
    """
    if tokens < LEAST:
        raise BadRequest(f"tokens is {tokens}; texts need at least {LEAST}", "tokens")
    settings = settings or Settings()
    name, guest, parameters = _opened(model, settings)
    if any(plane.storage is not None for group in guest.shape.groups for plane in group.planes):
        raise BadRequest("quantised K/V give other logits; verify the guest without them")
    layers, tokens = kinds(guest), min(tokens, context_of(guest.model))
    setup, checks = Setup(guest, tokens), list[CheckResult]()
    for number, check in enumerate(CHECKS):
        watch(check.name)
        with silence_transformers():
            checks.append(_tried(check, setup, seed * len(CHECKS) + number, layers))
    watch(BITS)
    with silence_transformers():
        bits = same_bits(guest, seed=seed)
    stored: list[KvQuality] = []
    if guest.shape.groups and (is_small(parameters) if quality is None else quality):
        watch("quantised K/V")
        stored = kv_quality(guest, named(settings.attention), WAYS, tokens=SAMPLE)
    return Report(
        name=name,
        architecture=type(guest.model).__name__,
        parameters=parameters,
        dtype=str(guest.dtype).removeprefix("torch."),
        device=str(guest.device),
        mode=guest.mode,
        layers=tuple(layers),
        tokens=tokens,
        seed=seed,
        promised=guest.dtype in EXACT,
        checks=tuple(checks),
        kv_quality=tuple(stored),
        bits=bits,
    )


def _opened(model: "Guest | PreTrainedModel | str | Path | None", settings: Settings) -> tuple[str, Guest, int]:
    """Its name, and how many parameters it has."""
    if isinstance(model, Guest):
        return type(model.model).__name__, model, sum(parameter.numel() for parameter in model.model.parameters())
    torch.set_num_threads(threads_of(settings.threads, torch.get_num_threads()).count)
    loaded = load(located(model), dtype=settings.dtype, device=settings.device, weights=settings.weights)
    if settings.pack and loaded.model.device.type == "cpu":
        pack_model(loaded.model)
    return loaded.name, build_guest(loaded.model, named(settings.attention)), loaded.parameters


def kinds(guest: Guest) -> list[str]:
    """The kinds of a model's layers: layouts of K/V, and kinds of recurrent state."""
    found = [str(group.layout) if guest.mode == "flat" else SOLO for group in guest.shape.groups]
    planes = guest.shape.recurrent.layers.values() if guest.shape.recurrent is not None else ()
    found += [plane.name.partition(" ")[0] for layer in planes for plane in layer]
    return list(dict.fromkeys(found))


def _tried(check: Check, setup: Setup, seed: int, layers: Sequence[str]) -> CheckResult:
    """Run a check. In half precision it fails only if it fails with several texts, as a defect does.

    There, rounding can change a router's choice between nearly equal experts, and then all later values differ.
    """
    first = result = _result(check, Harness(setup, seed), layers)
    for again in range(1, 1 if judged_as(setup.guest.model) in EXACT else TRIES):
        if result.outcome != "does not hold" or result.largest is None:
            break
        result = _result(check, Harness(setup, seed + again * FAR), layers)
    if result is first or result.outcome != "holds":
        return first
    assert first.largest is not None
    why = f"the first texts differed by {first.largest:.1e}, and others do not: a near tie, or rounding"
    return replace(result, note=f"{result.note}; {why}" if result.note else why)


def _result(check: Check, harness: Harness, layers: Sequence[str]) -> CheckResult:
    """Run a check once and compare logits. An exception is reported as a failure of the check, and not raised."""
    bound = TOLERANCE[judged_as(harness.guest.model)]
    result = CheckResult(
        check.name, check.description, tuple(filter(check.covers, layers)), "holds", None, None, bound, 0, 0
    )
    try:
        note = check.act(harness) or ""
        harness.close()
        gaps, other = harness.gaps(bound)
    except NotApplicable as why:
        return replace(result, outcome="not applicable", note=str(why))
    except CheckFailed as why:
        return replace(result, outcome="does not hold", note=str(why))
    except MODEL_ERRORS as error:
        text = str(error) if isinstance(error, KvcellarError) else f"{type(error).__name__}: {error}"
        return replace(result, outcome="does not hold", note=f"an operation raised {text}")
    rows = sum(map(len, gaps))
    if not all(bool(gap.isfinite().all()) for gap in gaps):
        return replace(result, outcome="does not hold", rows=rows, note="logits are not finite")
    difference = worst(gaps, judged_as(harness.guest.model))
    fine = difference <= bound and not (other and judged_as(harness.guest.model) in EXACT)
    return replace(
        result,
        outcome="holds" if fine else "does not hold",
        difference=difference,
        largest=max(float(gap.max()) for gap in gaps),
        rows=rows,
        other_text=other,
        note=note,
    )
