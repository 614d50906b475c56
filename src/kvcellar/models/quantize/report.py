"""report: what quantising a model directory did, as text."""

from collections.abc import Mapping
from typing import Any

_SHOWN = 3  # names of a list


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
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        lines.append(
            f"{len(names)} tensors by signed-max, since calibration does not help them: "
            f"{', '.join(names[:_SHOWN])}{more}"
        )
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
