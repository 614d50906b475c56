"""bench: ours against transformers, on this machine."""

import click

from kvcellar.cli.options import Verb


@click.command("bench", cls=Verb, epilog="Example: kvcellar bench --only ragged-8")
@click.option("--quick", is_flag=True, help="Everything small, to see that it works; its numbers mean nothing.")
@click.option("--only", help="One workload, by the name of its row.")
@click.option("--profile", help="Of this decoding workload, only where the time of a step goes.")
@click.option("--threads", type=int, default=1, show_default=True, help="CPU threads of both sides.")
def command(quick: bool, only: str | None, profile: str | None, threads: int) -> None:
    """Measure ours against transformers on the same weights, interleaved, in one run: a table, and one line of JSON."""
    from kvcellar.bench.run import run, run_profile

    if profile is not None:
        run_profile(profile, quick=quick, threads=threads)
    else:
        run(quick=quick, only=only, threads=threads)
