"""The NOTICE file that is shipped with the weights: their sources, and the copyright notices in them."""

import textwrap

from .corpus import NOTICE_LINES, Corpus, own_notice

OPENING = """\
The weights and the tokenizer in this folder were trained on source files of the standard library of CPython {python},
used under the Python Software Foundation License Version 2, which LICENSE.txt reproduces with the foundation's
copyright notice. manifest.json names every file with its hash.

The weights are offered as a work derived from those files, under the same terms. The change made to the files: they
were split into tokens, and a network learned which token follows which. A model this small that has seen its text
several times can repeat passages of it word for word.

Files whose first {lines} lines carry a copyright or permission notice of somebody else, and do not say that they are
licensed to the foundation, were left out; manifest.json lists them under "dropped_for_notices". The files that were
trained on speak of the rights of others in these words:
"""


def notice(python: str, corpus: Corpus) -> str:
    """`python` is the version; the notices stand in the order of the first file that carries each."""
    found: dict[str, list[str]] = {}
    for source in (*corpus.library, *corpus.tests):
        if text := own_notice(source.text):
            found.setdefault(text, []).append(source.path)
    blocks = [
        textwrap.fill(", ".join(paths), 116, break_on_hyphens=False) + "\n\n" + textwrap.indent(text, "    ")
        for text, paths in found.items()
    ]
    return "\n\n".join([OPENING.format(python=python, lines=NOTICE_LINES).rstrip(), *blocks]) + "\n"
