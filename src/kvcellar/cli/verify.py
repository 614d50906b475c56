"""verify: does the memory change the logits of a model? Runs the checks and prints the comparison."""

import json
from itertools import count
from typing import TYPE_CHECKING, Any

import click

from kvcellar import progress
from kvcellar.cli.loading import loading
from kvcellar.cli.options import Verb, given, model_options, quiet_option
from kvcellar.engine.imports import imported
from kvcellar.engine.settings import Settings

if TYPE_CHECKING:  # torch is imported when there is something to do, so that --help answers at once
    from kvcellar.verify.run import CheckResult, Report


@click.command("verify", cls=Verb, epilog="Example: kvcellar verify ./my-model --dtype float32")
@click.argument("model", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--tokens", type=int, default=512, show_default=True, help="Most tokens of a text.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the texts.")
@click.option(
    "--kv-quality/--no-kv-quality",
    default=None,
    help="Measure what storing K/V in fewer bits would do. Default: for small models.",
)
@model_options
@quiet_option
def command(
    model: str | None,
    as_json: bool,
    tokens: int,
    seed: int,
    kv_quality: bool | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Load MODEL and do with its memory what serving does: shared prefixes, forks, prompts in chunks, mixed
    batches, drafts that are rejected, steps that are given up, spans that are removed. All logits are compared with
    those of the model's own forward, which has no memory. Ends with 0 if they are the same in every check that applies.

    In float32 that is promised, to 1e-4 of the largest logit. In half precision a model differs from itself, so there a
    feed is judged by its middle row and a wider bound, and a difference counts if other tokens show it, too;
    --dtype float32 says more.
    """
    settings = Settings(**given(**options))
    with loading(quiet=quiet):
        imported()
        from kvcellar.verify.checks import CHECKS
        from kvcellar.verify.run import verify

        begun = count()
        report = verify(
            model,
            settings,
            tokens=tokens,
            seed=seed,
            quality=kv_quality,
            watch=lambda name: progress.report(f"checking {name}", next(begun), len(CHECKS) + 1),
        )
    click.echo(json.dumps(report.as_dict()) if as_json else _in_words(report))
    if not report.holds:
        click.get_current_context().exit(1)


def _in_words(report: "Report") -> str:
    lines = [
        f"{report.name}: {report.architecture}, {report.parameters:,} parameters, {report.dtype} on {report.device}, "
        f"served {report.mode}",
        *_table([("check", "layers", "", "difference", "bound"), *map(_row, report.checks)]),
        *(
            f"  {check.name}: {check.note}"
            for check in report.checks
            if check.outcome != "does not hold" and check.note
        ),
    ]
    if report.kv_quality:
        tokens = max(one.tokens for one in report.kv_quality)
        lines.append(f"  with K/V stored otherwise, over {tokens} tokens of its own (--kv-dtype of serve and run):")
        lines += [f"    {one}" for one in report.kv_quality]
    lines += [f"  {check}" for check in report.broken]
    applied = len(report.applied)
    lines.append(
        f"warm equals cold in {applied - len(report.broken)} of {applied} checks that apply"
        + ("" if report.promised else f"; {report.dtype} is reported, and not promised: --dtype float32 says more")
    )
    return "\n".join(lines)


def _row(check: "CheckResult") -> tuple[str, ...]:
    bound = f"{check.bound:.0e}" if check.outcome != "not applicable" else ""
    return check.name, ", ".join(check.layers) or "-", check.outcome, _difference(check), bound


def _difference(check: "CheckResult") -> str:
    if check.difference is None or check.largest is None:
        return ""
    middle = f" (middle {check.difference:.1e})" if check.difference != check.largest else ""
    return f"{check.largest:.1e}{middle}"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
