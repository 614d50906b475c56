"""verify: the subcommand that checks whether using the cache changes the logits of a model."""

import json
from collections.abc import Iterator
from itertools import count
from textwrap import indent
from typing import TYPE_CHECKING, Any

import click

from kvcellar import progress
from kvcellar.cli.completion import loadable_models
from kvcellar.cli.options import Command, given, json_option, kv_quality_option, quiet_option
from kvcellar.cli.printing import kv_quality_lines, table
from kvcellar.cli.progress_line import show_progress
from kvcellar.cli.pull import download_missing, pull_option
from kvcellar.cli.setting_options import model_options
from kvcellar.engine.load.settings import Settings
from kvcellar.frontend.engine import import_needed

if TYPE_CHECKING:  # torch is imported when it is needed, so that --help is fast
    from kvcellar.verify.run import CheckResult, Report


@click.command("verify", cls=Command, epilog="Example: kvcellar verify ./my-model --dtype float32")
@click.argument("model", required=False, shell_complete=loadable_models)
@json_option
@click.option("--tokens", type=int, default=512, show_default=True, help="Most tokens of a text.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the texts.")
@kv_quality_option
@model_options
@pull_option
@quiet_option
def command(model: str | None, as_json: bool, kv_quality: bool | None, pull: bool, quiet: bool, **options: Any) -> None:
    """Load MODEL and use its cache as serving does: shared prefixes, forks, prompts in chunks, mixed batches, rejected
    drafts, abandoned steps, removed spans. All logits are compared with those of the model's own forward, which uses no
    cache. Exit code 0 if they are equal in every check that applies.

    In float32 equality is promised, to 1e-4 of the largest logit. In half precision, where a model differs from itself,
    the median over tokens must stay below a wider bound, and a failure must repeat on other tokens;
    --dtype float32 is the stricter check.

    The bits of logits are compared, too: of rows that were decoded alone, read in chunks, batched or drafted. Where
    they differ, the first module that makes the difference is printed; this does not change the exit code.
    """
    asked = {name: options.pop(name) for name in ("tokens", "seed")}
    settings = Settings(**given(**options))
    download_missing(model, None, pull=pull, quiet=quiet)
    with show_progress(quiet=quiet):
        import_needed()
        from kvcellar.verify.run import verify

        report = verify(model, settings, **asked, quality=kv_quality, watch=_reporter())
    click.echo(json.dumps(report.as_dict()) if as_json else "\n".join(_lines(report)))
    if not report.holds:
        click.get_current_context().exit(1)


def _reporter() -> Any:
    from kvcellar.verify.checks import CHECKS

    begun = count()
    return lambda name: progress.report(f"checking {name}", next(begun), len(CHECKS) + 2)


def _lines(report: "Report") -> Iterator[str]:
    yield (
        f"{report.name}: {report.architecture}, {report.parameters:,} parameters, {report.dtype} on {report.device}, "
        f"served {report.mode}"
    )
    yield indent(table([("check", "layers", "", "difference", "bound"), *map(_row, report.checks)]), "  ")
    for check in report.checks:
        if check.outcome != "does not hold" and check.note:
            yield f"  {check.name}: {check.note}"
    yield from kv_quality_lines(report.kv_quality)
    yield f"  bits of a row's logits: the same in {sum(one.holds for one in report.bits)} of {len(report.bits)} ways"
    yield from (f"    {one}" for one in report.bits if not one.holds)
    yield from (f"  {check}" for check in report.broken)
    applied = len(report.applied)
    not_promised = f"; in {report.dtype} this is reported, not promised: use --dtype float32 for a strict check"
    yield (
        f"warm equals cold in {applied - len(report.broken)} of {applied} checks that apply"
        f"{'' if report.promised else not_promised}"
    )


def _row(check: "CheckResult") -> tuple[str, ...]:
    bound = f"{check.bound:.0e}" if check.outcome != "not applicable" else ""
    return check.name, ", ".join(check.layers) or "-", check.outcome, _difference(check), bound


def _difference(check: "CheckResult") -> str:
    if check.difference is None or check.largest is None:
        return ""
    median = f" (median {check.difference:.1e})" if check.difference != check.largest else ""
    return f"{check.largest:.1e}{median}"
