"""bench: ours against transformers, on this machine."""

import click

from kvcellar.bench.run import NAMES, run


@click.command("bench", epilog="Example: kvcellar bench --only prefill")
@click.option("--quick", is_flag=True, help="Everything small, to see that it works; its numbers mean nothing.")
@click.option("--only", type=click.Choice(NAMES), help="One workload.")
@click.option("--threads", type=int, default=1, show_default=True, help="CPU threads of both sides.")
def command(quick: bool, only: str | None, threads: int) -> None:
    """Measure ours against transformers on the same weights, interleaved, in one run: a table, and one line of JSON."""
    run(quick=quick, only=only, threads=threads)
