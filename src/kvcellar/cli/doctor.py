"""doctor: the subcommand that prints how a model is served, and the reasons."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any

import click

from kvcellar.cli.completion import loadable_models
from kvcellar.cli.options import MOST_TEXT, Command, given, json_option, kv_quality_option, quiet_option
from kvcellar.cli.printing import kv_quality_lines
from kvcellar.cli.progress_line import show_progress
from kvcellar.cli.pull import download_missing, pull_option
from kvcellar.cli.setting_options import engine_options
from kvcellar.engine.load.capacity import sized
from kvcellar.engine.load.settings import Settings
from kvcellar.engine.models.quantize.kinds import harm_line
from kvcellar.frontend.engine import import_needed

if TYPE_CHECKING:  # torch is imported when it is needed, so that --help is fast
    from kvcellar.verify.diagnosis import Diagnosis, DraftDiagnosis, GroupDiagnosis


@click.command("doctor", cls=Command, epilog="Example: kvcellar doctor ./my-model --cache-bytes 2G")
@click.argument("model", required=False, shell_complete=loadable_models)
@json_option
@kv_quality_option
@click.option(
    "--text",
    type=click.File(encoding="utf-8"),
    help="Measure what --weights changes on the beginning of this file, not on samples of the model.",
)
@engine_options
@pull_option
@quiet_option
def command(
    model: str | None,
    as_json: bool,
    kv_quality: bool | None,
    text: IO[str] | None,
    pull: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Load MODEL, test it, and print its groups, bytes per token, how many tokens fit, which attention backend serves
    it and why others do not, how requests without sampling parameters choose tokens, how quantised K/V would change its
    predictions, with --weights how these do, and with --draft whether that fits it.
    Exit code 1 if it is refused, or if the draft does not fit.
    """
    settings = Settings(**given(**options))
    download_missing(model, options["draft"], pull=pull, quiet=quiet)
    with show_progress(quiet=quiet):
        import_needed()
        from kvcellar.verify.diagnosis import diagnose

        found = diagnose(model, settings, kv_quality=kv_quality, text=None if text is None else text.read(MOST_TEXT))
    click.echo(json.dumps(asdict(found)) if as_json else "\n".join(_lines(found)))
    if found.draft is not None and not found.draft.fits:
        click.get_current_context().exit(1)


def _lines(found: "Diagnosis") -> Iterator[str]:
    yield f"{found.name}: {found.architecture}, {found.parameters:,} parameters, {found.dtype} on {found.device}"
    yield f"  context {found.context} tokens, vocabulary {found.vocab_size}, {found.layers} layers that store K/V"
    yield f"  served {found.mode}: logits within {found.difference:.1e} of its own forward ({found.bound:.0e} allowed)"
    if found.why_not_flat:
        yield f"  not flat, because {found.why_not_flat}"
    for group in found.groups:
        yield from _group(group)
    if (recurrent := found.recurrent) is not None:
        yield (
            f"  recurrent: {recurrent.layers} layers, {sized(recurrent.bytes_per_row)} per sequence of any length, "
            f"{recurrent.rows} rows in {sized(recurrent.bytes)}, {recurrent.checkpoints} or more for checkpoints"
        )
    yield from _memory(found)
    chosen = ", ".join(f"{name} {value:g}" for name, value in found.sampling.items())
    greedy = "greedy, " if found.sampling["temperature"] == 0 else ""
    yield f"  default sampling: {greedy}{chosen} ({found.sampling_because})"
    yield from (f"  {note}" for note in found.notes)
    if found.weights_harm is not None:
        yield f"  weights compared with dense ones: {harm_line(found.weights_harm)}"
    if found.draft is not None:
        yield from _draft(found.draft)
    yield from kv_quality_lines(found.kv_quality)


def _group(group: "GroupDiagnosis") -> Iterator[str]:
    yield (
        f"  group {group.name}: {group.layers} layers, {sized(group.bytes_per_cell)} per token, {group.cells} cells, "
        f"attention by {group.backend or 'the model itself'}"
    )
    if group.backend is not None:
        for name, refused in group.verdicts.items():
            supported = "chosen" if name == group.backend else "supported"
            yield f"    {name}: {supported if refused is None else f'refused: {refused}'}"


def _draft(draft: "DraftDiagnosis") -> Iterator[str]:
    """A table of the checks."""
    if draft.fits:
        memory = f", {draft.tokens} tokens in {sized(draft.cache_bytes)} of its own" if draft.cache_bytes else ""
        yield f"  draft {draft.name} fits: up to {draft.deepest} drafts of a completion in a step{memory}"
    else:
        yield f"  draft {draft.name} does not fit"
    width = max(map(len, (*draft.found, *draft.refused)))
    yield from (f"    {name:{width}}  no   {why}" for name, why in draft.refused.items())
    yield from (f"    {name:{width}}  yes  {what}" for name, what in draft.found.items())


def _memory(found: "Diagnosis") -> Iterator[str]:
    cache = sized(found.cache_bytes)
    if found.groups:
        yield f"  {sized(found.bytes_per_token)} per token in all groups; {found.tokens} tokens fit in {cache}"
    else:
        yield f"  {found.sequences} sequences of any length fit in {cache}"
    total = found.cache_bytes + found.scratch_bytes + found.staging_bytes
    yield (
        f"    with {sized(found.scratch_bytes)} for a step and {sized(found.staging_bytes)} for edits: {sized(total)} "
        f"of {sized(found.limit_bytes)}, which is {found.because}"
    )
