"""kinds: the names of types that weights can be quantised or cast to, and what quantising did, as text. No torch."""

from collections.abc import Mapping
from typing import Any, Literal

from kvcellar.errors import BadRequest, first_few, shown

INT8, INT4, MIXED = "int8", "int4", "mixed"
QUANTISED = (INT8, INT4, MIXED)
AUTO, DENSE = "auto", "dense"
CodesKind = Literal["auto", "int8", "int4"]  # of codes that are served: those of a file, or what it is rounded to
WEIGHTS = (AUTO, *QUANTISED, DENSE)  # how weights can be multiplied
CASTS = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_NAMES = {
    INT8: ("int8", "q8", "q8_0", "fp8"),  # fp8 as in Ollama: 8 bits, here integers
    INT4: ("int4", "q4", "fp4", "q4_0", "q4_k_s"),
    MIXED: ("mixed", "q4_k_m", "q4_k"),
    "bf16": ("bf16",),
    "f16": ("f16",),
    "f32": ("f32",),
}
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names}
METHODS = (SIGNED_MAX, GPTQ) = ("signed-max", "gptq")


def canonical_kind(text: str) -> str:
    """`int8`, `int4`, `mixed`, `bf16`, `f16` or `f32`, from one of their names in any case. Raises `BadRequest`."""
    kind = _KINDS.get(text.strip().lower())
    if kind is None:
        names = ", ".join(f"{kind} ({', '.join(more)})" if more else kind for kind, (_, *more) in _NAMES.items())
        raise BadRequest(f"weights cannot be quantised to {shown(text)}; supported types are {names}", "quantize")
    return kind


def report_lines(report: Mapping[str, Any], requested: str | None = None) -> list[str]:
    """The report of `quantize_directory`, in lines to print. `requested` is the name that the type was given by."""
    kind = report["kind"]
    named = kind if requested is None or requested.strip().lower() == kind else f"{requested} ({_meaning(kind)})"
    before, after = report["source_bytes"], report["bytes"]
    by = f" by {report['method']}" if report["weights"].get("int4") else ""
    lines = [f"{named}{by}: {before / 1e6:,.1f} MB became {after / 1e6:,.1f} MB ({after / before:.0%})"]
    lines.append("weights: " + ", ".join(f"{count:,} {name}" for name, count in report["weights"].items()))
    if report["left"]:
        lines.append("tensors left: " + ", ".join(f"{count} {why}" for why, count in report["left"].items()))
    if (calibration := report.get("calibration")) is not None:
        lines += _calibration(calibration)
    if (harm := report.get("harm")) is not None:
        lines.append(harm_line(harm))
    return lines


def _meaning(kind: str) -> str:
    return {"int8": "8-bit integers", "int4": "4-bit integers", "mixed": "4-bit and 8-bit integers"}.get(kind, kind)


def _calibration(calibration: Mapping[str, Any]) -> list[str]:
    lines = [f"calibrated on {calibration['tokens']:,} tokens: {calibration['text']}"]
    if names := calibration["by_the_rule"]:
        lines.append(f"{len(names)} tensors by signed-max, since calibration does not help them: {first_few(names)}")
    return lines


def harm_line(harm: Mapping[str, Any]) -> str:
    """What `measure_harm` returns."""
    source, own = (_number(harm[name]) for name in ("source_perplexity", "perplexity"))
    return (
        f"predictions on {harm['tokens']:,} tokens ({harm['text']}): KL {harm['kl']:.3g} nats, "
        f"same most likely token {harm['top1']:.1%}, perplexity {source} became {own}"
    )


def _number(value: float | None) -> str:
    return "no number" if value is None else f"{value:.4g}"
