"""Trains the embedded demo model on the standard library of this interpreter, and exports it.

    python scripts/train_embedded.py                    the recipe of the shipped model, into its folder
    python scripts/train_embedded.py --arch gemma3      another architecture
    python scripts/train_embedded.py --export-only      export the last checkpoint, finished or not

A run that was stopped goes on from its last checkpoint when it is started with the same options, and one that is done
is only exported again; remove the folder named by --work to train anew.
"""

from embedded_trainer.command import main

if __name__ == "__main__":
    main(__doc__)
