"""pull: the subcommand that downloads a model."""

import dataclasses
import json

import click

from kvcellar.cli.downloads import download
from kvcellar.cli.options import Command, quiet_option


@click.command("pull", cls=Command, epilog="Example: kvcellar pull Qwen/Qwen3-0.6B && kvcellar run Qwen/Qwen3-0.6B")
@click.argument("model")
@click.option("--revision", help="Branch, tag or commit. Default: main. Or MODEL@REVISION.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@quiet_option
def command(model: str, revision: str | None, as_json: bool, quiet: bool) -> None:
    """Download MODEL (owner/name) from a hub into the local Hugging Face cache, where `kvcellar run` and others find
    it: its weights as safetensors, configs, tokenizer and chat templates, and nothing else.

    What is there is checked, not downloaded again, and an interrupted download is continued. A private or gated model
    needs HF_TOKEN, or a login with `hf auth login`. HF_ENDPOINT names another hub, HF_HOME another cache.
    """
    pulled = download(model, revision=revision, quiet=quiet)
    assert pulled is not None  # only a user who was asked can refuse
    if as_json:
        click.echo(json.dumps({**dataclasses.asdict(pulled), "directory": str(pulled.directory)}))
        return
    from kvcellar.library.hub_cache import sized

    click.echo(
        f"{pulled.name}: {pulled.files} files with {sized(pulled.bytes)}, {sized(pulled.downloaded_bytes)} of them "
        f"downloaded now (commit {pulled.commit[:12]})"
    )
    if pulled.unchecked:
        click.echo(f"The hub lists no SHA-256 of {', '.join(pulled.unchecked)}: not checked", err=True)
