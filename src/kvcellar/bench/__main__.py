"""`python -m kvcellar.bench`: the bench without the rest of the command."""

import argparse

from kvcellar.bench.run import NAMES, run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvcellar.bench", description=run.__doc__)
    parser.add_argument("--quick", action="store_true", help="everything small, to see that it works")
    parser.add_argument("--only", choices=NAMES, help="one workload")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of both sides (1)")
    given = parser.parse_args()
    run(quick=given.quick, only=given.only, threads=given.threads)


if __name__ == "__main__":
    main()
