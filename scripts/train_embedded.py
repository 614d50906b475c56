"""Trains the embedded demo model on the standard library of this interpreter, then its MTP head, and exports both.

    python scripts/train_embedded.py                            the recipe of the shipped model, into its folder
    python scripts/train_embedded.py --stage head               only the head, for the model in that folder
    python scripts/train_embedded.py --stage vision             the embedded model that sees
    python scripts/train_embedded.py --arch gemma3 --out DIR    another architecture
    python scripts/train_embedded.py --export-only              export the last checkpoints, finished or not
    python scripts/train_embedded.py --stage head --measure     print the acceptance of the exported head's drafts

Training the head does not change the exported model. A run that was stopped resumes at its last checkpoint when it is
started with the same options; a finished run is only exported again. To train again from the start, remove the folder
named by --work.
"""

from embedded_trainer.command import main

if __name__ == "__main__":
    main(__doc__)
