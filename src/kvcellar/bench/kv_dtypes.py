"""kv_dtypes: how quantised K/V change the predictions of a model.

`python -m kvcellar.bench.kv_dtypes` prints it for the embedded model, or for another one.

At every position of a text sampled from the model, its most likely token and its distribution are compared with those
computed with unquantised K/V.
"""

import argparse
import json
from dataclasses import asdict

from kvcellar.attention.choose import named
from kvcellar.engine.build import build
from kvcellar.engine.settings import Settings
from kvcellar.verify.kv_quality import WAYS, KvQuality, kv_quality

TOKENS = 2000


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvcellar.bench.kv_dtypes", description=__doc__)
    parser.add_argument("model", nargs="?", help="a directory or a name (the embedded model)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"tokens of the text ({TOKENS})")
    parser.add_argument("--dtype", default="auto", help="type of computation (that of the weights)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (1)")
    given = parser.parse_args()
    built = build(given.model, Settings(dtype=given.dtype, threads=given.threads))
    found = kv_quality(built.guest, named(None), ("auto", *WAYS), tokens=given.tokens)
    print(
        f"{built.loaded.name}, {str(built.guest.dtype).removeprefix('torch.')}, {given.tokens} tokens sampled from it"
    )
    print(f"{'kv_dtype':16} {'bytes a token':>13} {'same token':>10} {'KL, nats':>9}")
    for one in found:
        print(_line(one))
    print(json.dumps({"model": built.loaded.name, "results": [asdict(one) for one in found]}))


def _line(one: KvQuality) -> str:
    if one.kl is None or one.agreement is None:
        return f"{one.stored:16} refused: {one.refused}"
    return f"{one.stored:16} {one.bytes_per_token:13} {one.agreement:10.2%} {one.kl:9.1e}"


if __name__ == "__main__":
    main()
