"""How each architecture of the zoo is served with the transformers that we pin: flat, unless it is named here.

A change of this table is a change of what users get. `scripts/canary.py` compares it with another transformers.
"""

from typing import Literal

from tests.zoo import ARCHS

OWN_ATTENTION = "does not go through transformers' attention interface"
STATE = "it keeps recurrent or convolution state beside keys and values, which is not served yet"
STATEFUL = "it keeps recurrent state, which is not served yet"
INDEXER = "it selects keys with an indexer of its own, which is not served yet"

SOLO = {  # one sequence per forward, and why not flat
    "diffllama": "attends twice in one forward",
    "doge": "a mask that the model made or changed by itself",
    **dict.fromkeys(
        ("falcon", "falcon-alibi", "gptj", "codegen", "gpt-neo", "gpt-neox-japanese", "xglm", "bloom", "mpt"),
        OWN_ATTENTION,
    ),
}
REFUSED = {  # and why
    **dict.fromkeys(("deepseek-v3.2", "glm-moe-dsa", "hy-v4"), INDEXER),
    **dict.fromkeys(
        ("lfm2", "lfm2-moe", "lfm3", "qwen3-next", "qwen3.5", "qwen3.5-moe", "olmo-hybrid", "kimi-linear",
         "bailing-hybrid", "falcon-h1", "jamba", "bamba", "granitemoehybrid", "nemotron-h", "zamba", "zamba2", "zaya",
         "inkling", "inkling2"),
        STATE,
    ),
    **dict.fromkeys(
        ("mamba", "falcon-mamba", "mamba2", "rwkv", "xlstm", "recurrent-gemma", "deepseek-v4"),
        STATEFUL,
    ),
    "minimax-m3": "its code raised IndexError",  # its cache layers are of its own making
    "minimax-01": "MiniMax uses cache of its own",
    "openai-gpt": "stores no keys and values through the cache",
}  # fmt: skip
SERVED = tuple(name for name in ARCHS if name not in REFUSED)
FLAT = tuple(name for name in SERVED if name not in SOLO)


def expected(name: str) -> Literal["flat", "solo", "refused"]:
    return "refused" if name in REFUSED else "solo" if name in SOLO else "flat"
