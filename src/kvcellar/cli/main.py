"""main: the `kvcellar` command. Verbs are imported when they are used, so that `--help` answers at once.

Exit codes: 0 done; 1 refused or failed, with one line that says why; 2 wrong usage; 130 interrupted; 128 and the number
of the signal where `serve` was signalled twice.
"""

import errno
import importlib
import os
import sys

import click

from kvcellar import __version__
from kvcellar.errors import KvcellarError

ENVIRONMENT = {  # of this process, for libraries that read it when they are first used; what is set already stays
    "TOKENIZERS_PARALLELISM": "false",
    # Kernels that oneDNN keeps, one for each shape that it meets, up to half a megabyte each; 1024 if nothing is said.
    # What we call it with has a few hundred shapes; a model's own code may call it with any number.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "512",
}
VERBS = {
    "run": "Talk to a model, or let it answer one prompt.",
    "serve": "Serve a model over HTTP, as the OpenAI API.",
    "doctor": "Say what a model is, how it would be served, and what would not.",
    "verify": "Show that a model's warm answer equals its cold one, on this machine.",
    "bench": "Measure ours against transformers, in one run.",
}


class Verbs(click.Group):
    """Finds each verb in the module of its name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"kvcellar.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.command(
    cls=Verbs,
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
        code = 130
    except (KvcellarError, OSError) as error:
        click.echo(f"kvcellar: {' '.join(_message(error).split())}", err=True)
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


def _message(error: Exception) -> str:
    """What to print of an error that ends the command. A full disk is named as such, with the file if it is known."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left on the disk of {error.filename or 'the file that the output goes to'} ({error.strerror})"
    return str(error)


if __name__ == "__main__":
    main()
