"""bench: ours against transformers, on this machine."""

import click


@click.command("bench", epilog="Example: kvcellar bench --only prefill")
@click.option("--quick", is_flag=True, help="Everything small, to see that it works; its numbers mean nothing.")
@click.option("--only", help="One workload, by the name that its row has.")
@click.option("--threads", type=int, default=1, show_default=True, help="CPU threads of both sides.")
def command(quick: bool, only: str | None, threads: int) -> None:
    """Measure ours against transformers on the same weights, interleaved, in one run: a table, and one line of JSON."""
    from kvcellar.bench.run import run

    run(quick=quick, only=only, threads=threads)
