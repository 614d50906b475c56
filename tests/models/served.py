"""How each architecture of the zoo is served with the pinned transformers: flat, unless it is listed here.

A change of this table is visible to users. `scripts/canary.py` compares it with another release of transformers.
"""

from typing import Literal

from tests.zoo import ARCHS

OWN_ATTENTION = "does not go through transformers' attention interface"
INDEXER = "it selects keys with an indexer of its own"

SOLO = {  # one sequence per forward, and why not flat
    "diffllama": "attends twice in one forward",
    "doge": "a mask that the model made or changed by itself",
    **dict.fromkeys(
        ("falcon", "falcon-alibi", "gptj", "codegen", "gpt-neo", "gpt-neox-japanese", "xglm", "bloom", "mpt"),
        OWN_ATTENTION,
    ),
    **dict.fromkeys(("inkling", "inkling2"), "position_bias"),
    **dict.fromkeys(("deepseek-v3.2", "glm-moe-dsa", "hy-v4"), INDEXER),
    **dict.fromkeys(("deepseek-v4", "minimax-m3"), "a cache layer of their own class"),
}
REFUSED = {  # and why
    **dict.fromkeys(("rwkv", "openai-gpt"), "stores nothing through the cache"),
    "xlstm": "no attribute 'rnn_state'",  # a cache of its own
    "recurrent-gemma": "its logits differ",  # its state is in the modules
    "minimax-01": "MiniMax uses cache of its own",
}  # fmt: skip
SERVED = tuple(name for name in ARCHS if name not in REFUSED)
FLAT = tuple(name for name in SERVED if name not in SOLO)


def expected(name: str) -> Literal["flat", "solo", "refused"]:
    return "refused" if name in REFUSED else "solo" if name in SOLO else "flat"
