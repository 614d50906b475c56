"""__main__: `python -m kvcellar` does what the command `kvcellar` does."""

from kvcellar.cli.main import main

if __name__ == "__main__":
    main()
