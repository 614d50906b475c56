"""main: the `kvcellar` command. Subcommands are imported when they are used, so that `--help` is fast.

Exit codes: 0 success; 1 refused or failed, with the reason in one line; 2 wrong usage; 130 interrupted; 128 plus the
number of the signal if `serve` got a second signal.
"""

import errno
import importlib
import os
import sys
from dataclasses import make_dataclass

import click

from kvcellar import __version__
from kvcellar.errors import KvcellarError

ENVIRONMENT = {  # environment variables for libraries; variables that are set already are not changed
    "TOKENIZERS_PARALLELISM": "false",
    # Size of oneDNN's kernel cache (default 1024): one kernel per shape, of up to half a megabyte. kvcellar uses a few
    # hundred shapes; the code of a model can use any number.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "512",
    # torch's own threads sleep while they wait. By default they compete for milliseconds with whatever else wants their
    # cores: with other work on all cores, a copy of 4 MB on two threads takes 25 ms, and 0.6 ms if they sleep.
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
COMMANDS = {
    "run": "Chat with a model at the terminal, or complete one prompt.",
    "serve": "Serve models over HTTP, with the APIs of OpenAI, Anthropic and Ollama.",
    "cluster": "Serve models by several engines on Ray, and look at them.",
    "pull": "Download a model from a hub.",
    "create": "Make a model of the library from a Modelfile.",
    "list": "List the models of the library.",
    "show": "Print what is known about a model of the library.",
    "cp": "Give a model of the library a second name.",
    "rm": "Remove models from the library.",
    "ps": "List the models that a running server has loaded.",
    "stop": "Let a running server unload a model.",
    "top": "Show what a running server does, and what its requests find in memory.",
    "why": "Print why a request did not read more from memory.",
    "cache": "List, remove, verify, export and import what is cached.",
    "doctor": "Test a model and print how it would be served, and why.",
    "verify": "Check on this machine that using the cache does not change a model's logits.",
    "bench": "Measure kvcellar and other engines on the same weights.",
}
FILES = {
    **dict.fromkeys(("list", "show", "cp", "rm"), "library"),
    **dict.fromkeys(("ps", "stop", "why"), "client"),
}
ALIASES = {"ls": "list"}


class Commands(click.Group):
    """Imports the file of a subcommand when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = ALIASES.get(cmd_name, cmd_name)
        if name not in COMMANDS:
            return None
        if (file := FILES.get(name)) is not None:  # of several subcommands
            return getattr(importlib.import_module(f"kvcellar.cli.{file}"), f"{name}_command")
        return importlib.import_module(f"kvcellar.cli.{name}").command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(
    cls=Commands,
    epilog="Examples: `kvcellar run`, `kvcellar run ./my-model 'Once upon'`, `kvcellar serve ./my-model --port 8080`.",
)
@click.version_option(__version__, prog_name="kvcellar")
def cli() -> None:
    """The memory of LLM inference: any Hugging Face causal language model, on its own caches."""


def main() -> None:
    """The console script."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        code = cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        # CPython notes an interrupt that ends the execution of a text, as while a dataclass is made by an import, until
        # the next such text; `python -m` would then end by the signal, whatever is raised after it.
        make_dataclass("Last", ())
        code = 130
    except (KvcellarError, OSError) as error:
        click.echo(f"kvcellar: {' '.join(_message(error).split())}", err=True)
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


def _message(error: Exception) -> str:
    """The message of an error that ends the command. For a full disk it names the file, if it is known."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left on the disk of {error.filename or 'the file that the output goes to'} ({error.strerror})"
    return str(error)
