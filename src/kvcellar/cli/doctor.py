"""doctor: what a model is, how it would be served, and why not otherwise."""

import json
from typing import TYPE_CHECKING, Any

import click

from kvcellar.cli.loading import loading
from kvcellar.cli.options import Verb, engine_options, given, quiet_option
from kvcellar.engine.imports import imported
from kvcellar.engine.settings import Settings, sized

if TYPE_CHECKING:  # torch is imported when there is something to do, so that --help answers at once
    from kvcellar.verify.diagnosis import Diagnosis


@click.command("doctor", cls=Verb, epilog="Example: kvcellar doctor ./my-model --cache-bytes 2G")
@click.argument("model", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--kv-quality/--no-kv-quality",
    default=None,
    help="Measure what storing K/V in fewer bits would do. Default: for small models.",
)
@engine_options
@quiet_option
def command(model: str | None, as_json: bool, kv_quality: bool | None, quiet: bool, **options: Any) -> None:
    """Load MODEL, test it, and say: what it is, its groups, bytes per token, how many tokens fit, which attention
    backend serves it and why the others refused, and what storing its K/V in fewer bits would do to its answers. Ends
    with 1 if it is refused.
    """
    settings = Settings(**given(**options))
    with loading(quiet=quiet):
        imported()
        from kvcellar.verify.diagnosis import diagnose

        found = diagnose(model, settings, kv_quality=kv_quality)
    click.echo(json.dumps(found.as_dict()) if as_json else _in_words(found))


def _in_words(found: "Diagnosis") -> str:
    lines = [
        f"{found.name}: {found.architecture}, {found.parameters:,} parameters, {found.dtype} on {found.device}",
        f"  context {found.context} tokens, vocabulary {found.vocab_size}, {found.layers} layers that store K/V",
        f"  served {found.mode}: logits within {found.difference:.1e} of its own forward's ({found.bound:.0e} allowed)",
    ]
    if found.why_not_flat:
        lines.append(f"  not flat, because {found.why_not_flat}")
    for group in found.groups:
        lines.append(
            f"  group {group.name}: {group.layers} layers, {sized(group.bytes_per_cell)} a token, {group.cells} cells, "
            f"attention by {group.backend or 'the model itself'}"
        )
        if group.backend is not None:
            lines += [f"    {name} {_verdict(name == group.backend, why)}" for name, why in group.verdicts.items()]
    if (recurrent := found.recurrent) is not None:
        lines.append(
            f"  recurrent: {recurrent.layers} layers, {sized(recurrent.bytes_per_row)} a sequence however long "
            f"it is, {recurrent.rows} rows in {sized(recurrent.bytes)}, {recurrent.captures} or more of them kept "
            f"to go back to"
        )
    held = sized(found.cache_bytes)
    if found.groups:
        lines.append(f"  {sized(found.bytes_per_token)} a token in all; {found.tokens} tokens fit in {held}")
    else:
        lines.append(f"  {found.sequences} sequences of any length fit in {held}")
    total = found.cache_bytes + found.scratch_bytes + found.staging_bytes
    lines.append(
        f"    with {sized(found.scratch_bytes)} for a step and {sized(found.staging_bytes)} for edits that is "
        f"{sized(total)} of {sized(found.limit_bytes)}, which is {found.because}"
    )
    lines += [f"  {note}" for note in found.notes]
    if found.kv_quality:
        tokens = max(one.tokens for one in found.kv_quality)
        lines.append(f"  K/V stored otherwise, over {tokens} tokens of its own (--kv-dtype):")
        lines += [f"    {one}" for one in found.kv_quality]
    return "\n".join(lines)


def _verdict(chosen: bool, refused: str | None) -> str:
    if refused is not None:
        return f"refused: {refused}"
    return "was chosen" if chosen else "could serve it, too"
