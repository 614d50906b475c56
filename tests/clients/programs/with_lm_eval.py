"""Log-likelihoods of continuations, and text up to a stop string, as tasks ask for them."""

import json
import sys

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

URL, MODEL = sys.argv[1:]
model = LocalCompletionsAPI(
    base_url=f"{URL}/v1/completions",
    model=MODEL,
    tokenizer_backend="remote",
    max_retries=1,
    max_length=256,
    batch_size=2,
)
pairs = [("def main():", " return 1"), ("import os", "\n\nclass Dog:"), ("x = ", "y")]
asked = [Instance("loglikelihood", {}, pair, at) for at, pair in enumerate(pairs)]
until = [Instance("generate_until", {}, ("def main():", {"until": ["\n\n"], "max_gen_toks": 8}), 0)]
found = {
    "pairs": [
        dict(zip(("context", "continuation"), model._encode_pair(context, continuation), strict=True))
        for context, continuation in pairs
    ],
    "scores": [[score, bool(greedy)] for score, greedy in model.loglikelihood(asked)],
    "prompt": model.tok_encode("def main():"),
    "text": model.generate_until(until),
}
json.dump(found, sys.stdout)
