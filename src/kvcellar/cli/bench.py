"""bench: the subcommand that measures kvcellar and other engines on this machine."""

import click

from kvcellar.cli.options import Command
from kvcellar.engine.settings import RECORD
from kvcellar.errors import BadRequest


@click.command("bench", cls=Command, epilog="Example: kvcellar bench --only ragged-8")
@click.option("--quick", is_flag=True, help="Run everything with tiny sizes, to test the bench. Numbers mean nothing.")
@click.option("--only", help="Run one workload, by the name in its row.")
@click.option(
    "--against",
    multiple=True,
    help="Measure a peer on the same weights and tokens, interleaved: transformers, llama.cpp, openvino or vllm, or "
    "NAME:PRECISION. Repeatable. With --only replay: count the same for its cache, too; transformers.",
)
@click.option(
    "--peer-python",
    multiple=True,
    metavar="NAME=PATH",
    envvar="KVCELLAR_PEER_PYTHON",
    help="The Python interpreter of the environment in which a peer is installed. Repeatable.",
)
@click.option(
    "--profile",
    help="Print where the time of a step goes, of decode-512 or another that has a profile; with --record auto, of a "
    "recorded step.",
)
@click.option("--threads", type=int, default=1, show_default=True, help="CPU threads of all engines.")
@click.option("--size", type=click.Choice(["125m", "0.5b"]), help="Parameters of the network. With --against only.")
@click.option("--record", type=click.Choice(RECORD), help="That setting of kvcellar, where processes are measured.")
def command(
    quick: bool,
    only: str | None,
    against: tuple[str, ...],
    peer_python: tuple[str, ...],
    profile: str | None,
    threads: int,
    size: str | None,
    record: str | None,
) -> None:
    """Measure kvcellar and transformers on the same weights, interleaved, in one run. Prints a table and one line of
    JSON."""
    from kvcellar.bench.compared import run_against
    from kvcellar.bench.run import REPLAY, run, run_profile

    peers = bool(against) and only != REPLAY
    if size is not None and not peers:
        with_replay = f", but not with --only {REPLAY}, which runs no network" if against else ""
        raise BadRequest(f"size is for --against{with_replay}; leave it out", "size")
    if profile is not None:
        run_profile(profile, quick=quick, threads=threads, recorded=record == "auto")
    elif peers:
        run_against(against, peer_python, only=only, quick=quick, threads=threads, size=size, record=record)
    else:
        run(quick=quick, only=only, threads=threads, beside=", ".join(against) or None, record=record)
