"""Log-likelihoods with lm-eval. Run it: python examples/clients/lm_eval_scores.py http://127.0.0.1:8080

`pip install 'lm-eval[api]'`. Tasks of lm-eval score possible continuations of a text like this; a task itself is run by
`lm_eval run --model local-completions --tasks NAME --model_args
base_url=http://127.0.0.1:8080/v1/completions,model=NAME,tokenizer_backend=remote`.
"""

import argparse
import json
import urllib.request

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

TEXT, CONTINUATIONS = "import os\nimport", (" sys", " Paris")


def main(address: str) -> None:
    with urllib.request.urlopen(f"{address}/v1/models") as response:
        name = json.load(response)["data"][0]["id"]
    # `remote`: the server tokenizes, so no tokenizer has to be here.
    model = LocalCompletionsAPI(
        base_url=f"{address}/v1/completions", model=name, tokenizer_backend="remote", max_length=512
    )
    asked = [Instance("loglikelihood", {}, (TEXT, one), at) for at, one in enumerate(CONTINUATIONS)]
    for continuation, (score, greedy) in zip(CONTINUATIONS, model.loglikelihood(asked), strict=True):
        print(f"{continuation!r} has log-likelihood {score:.3f}; the most likely: {bool(greedy)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="of the server, without a path")
    main(parser.parse_args().address)
