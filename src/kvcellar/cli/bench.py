"""bench: the subcommand that measures kvcellar and other engines on this machine."""

import signal

import click

from kvcellar.cli.options import Command
from kvcellar.cli.progress_line import show_progress
from kvcellar.engine.load.settings import RECORD
from kvcellar.errors import BadRequest


@click.command("bench", cls=Command, epilog="Example: kvcellar bench --only ragged-8")
@click.option("--quick", is_flag=True, help="Run everything with tiny sizes, to test the bench. Numbers mean nothing.")
@click.option(
    "--only",
    metavar="ROW",
    help="Run one row, by its name. kinds: everyday models and other kinds of layers, with random weights.",
)
@click.option(
    "--against",
    multiple=True,
    metavar="PEER",
    default=["transformers"],
    help="A peer to compare with: transformers, llama.cpp, openvino or vllm, or NAME:PRECISION. Repeatable. Default: "
    "transformers.",
)
@click.option(
    "--peer-python",
    multiple=True,
    metavar="NAME=PATH",
    envvar="KVCELLAR_PEER_PYTHON",
    help="The Python interpreter of the environment in which a peer is installed. Repeatable.",
)
@click.option("--threads", type=int, default=1, show_default=True, help="CPU threads of all engines.")
@click.option(
    "--serve",
    is_flag=True,
    help="Measure whole servers over HTTP, and the engine alone: rows greedy-N, sampled-N and system-N with N streams. "
    "Peers are vllm, llama.cpp and transformers; the clients are vLLM's.",
)
@click.option("--record", type=click.Choice(RECORD), help="That setting of kvcellar.")
def command(
    quick: bool,
    only: str | None,
    against: tuple[str, ...],
    peer_python: tuple[str, ...],
    threads: int,
    serve: bool,
    record: str | None,
) -> None:
    """Measure kvcellar and other engines on the same weights and tokens, interleaved, each in a process of its own.
    Prints a table and one line of JSON."""
    from kvcellar.bench.compared import run_against
    from kvcellar.bench.served import run_served

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # peers end with the bench
    if serve and record:
        raise BadRequest("--serve has the defaults of a server", "record")
    with show_progress(prints=True):
        if serve:
            run_served(against, peer_python, only=only, quick=quick, threads=threads)
        else:
            run_against(against, peer_python, only=only, quick=quick, threads=threads, record=record)
