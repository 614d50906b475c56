"""From the library's folder to streams of tokens, kept in the working folder so that a run can resume."""

import hashlib
import json
import logging
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from .corpus import Corpus, Source, gather
from .tokens import PATTERN, SPECIALS, Mixture, Pool, column_zero, encode_files, load_tokenizer, train_tokenizer

log = logging.getLogger(__name__)

POOLS = ("library", "tests", "held_library", "held_tests")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A corpus in tokens: the tokenizer, a stream per pool, and the manifest of what they were made of.

    Equal stamps mean equal streams.
    """

    tokenizer: Tokenizer
    streams: dict[str, Tensor]
    manifest: dict[str, Any]
    stamp: str

    def mixture(self, test_share: float) -> Mixture:
        """`test_share` of the windows from the tests, the rest from the library; without tests it must be 0."""
        shares = {"library": 1 - test_share, "tests": test_share} if test_share else {"library": 1.0}
        return Mixture(tuple(self._pool(name) for name in shares), tuple(shares.values()))

    def _pool(self, name: str) -> Pool:
        return Pool(self.streams[name], column_zero(self.tokenizer, self.streams[name]))

    def held_bytes(self, name: str) -> int:
        """UTF-8 bytes of a pool's text, as it was tokenized."""
        return self.manifest["pools"][name]["bytes"]


def manifest_of(corpus: Corpus) -> dict[str, Any]:
    """Every file by path and hash, pool by pool; `bytes` counts text with tabs expanded."""
    pools: dict[str, Any] = {}
    for name in POOLS:
        sources: tuple[Source, ...] = getattr(corpus, name)
        pools[name] = {
            "bytes": sum(len(source.text.encode()) for source in sources),
            "files": {source.path: source.sha256 for source in sources},
        }
    return {"python": platform.python_version(), "pools": pools, "dropped_for_notices": list(corpus.dropped)}


def prepare(
    root: Path, work: Path, vocabulary: int, *, with_tests: bool = True, tokenizer: Path | None = None
) -> Prepared:
    """Reads `root`; trains the tokenizer, unless one is given, and encodes, unless `work` holds that already for the
    same files."""
    corpus = gather(root, with_tests=with_tests)
    manifest = manifest_of(corpus)
    made_of = [manifest, vocabulary, PATTERN, SPECIALS]
    if tokenizer is not None:
        made_of.append(tokenizer.read_text())
    stamp = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
    tokenizer_file, streams_file, stamp_file = (work / n for n in ("tokenizer.json", "tokens.safetensors", "stamp"))
    if stamp_file.exists() and stamp_file.read_text() == stamp:
        return Prepared(load_tokenizer(tokenizer_file), load_file(streams_file), manifest, stamp)
    if tokenizer is None:
        log.info("training the tokenizer on %d files", len(corpus.library) + len(corpus.tests))
        tokens = train_tokenizer((s.text for s in (*corpus.library, *corpus.tests)), vocabulary)
    else:
        tokens = load_tokenizer(tokenizer)
    streams = {name: encode_files(tokens, [s.text for s in getattr(corpus, name)]) for name in POOLS}
    work.mkdir(parents=True, exist_ok=True)
    tokens.save(str(tokenizer_file))
    save_file(streams, streams_file)
    stamp_file.write_text(stamp)
    return Prepared(tokens, streams, manifest, stamp)
