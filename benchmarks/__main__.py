"""`python -m benchmarks`."""

import os

from kvcellar.cli.main import ENVIRONMENT


def main() -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from benchmarks.run import main  # imports the libraries that read them

    main()


main()
