"""`model.generate()` of transformers with K/V in kvcellar's cells. Run it: python examples/generate.py

A small network with sliding and full attention completes a batch of two prompts by greedy search, continues them, and
completes them by beam search; the tokens equal those with the cache of transformers. Its weights are random, so the
text means nothing: replace it with a model of attention layers.
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig, PreTrainedModel

from kvcellar.engine.models import embedded
from kvcellar.engine.models.generation import GenerationCache


def network(vocabulary: int) -> PreTrainedModel:
    """Four layers; every other one has a window of 16 tokens."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=16, layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=512, eos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def main() -> list[str]:
    """The greedy texts of both prompts."""
    tokenizer = AutoTokenizer.from_pretrained(embedded.path(), local_files_only=True, padding_side="left")
    model = network(len(tokenizer))
    batch = tokenizer(["import os\nimport", "def main():\n"], return_tensors="pt", padding=True)
    how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    cache = GenerationCache.of(model, cells=512)
    ours = model.generate(**batch, past_key_values=cache, **how)
    assert torch.equal(ours, model.generate(**batch, **how)), (
        "the tokens differ from those with the cache of transformers"
    )
    free = min(cache.memory.free().values())
    print(f"after greedy search: {len(cache.rows)} rows of {cache.get_seq_length()} tokens, {free} cells free")
    more = model.generate(
        ours, attention_mask=torch.cat([batch["attention_mask"], torch.ones(2, 12, dtype=torch.long)], 1),
        past_key_values=cache, **how,
    )  # fmt: skip
    print(f"continued without computing any token again: {cache.get_seq_length()} tokens")
    cache.reset()
    beams = model.generate(**batch, past_key_values=cache, num_beams=3, **how)
    print(f"beam search, whose beams share their cells: {tokenizer.decode(beams[0], skip_special_tokens=True)!r}")
    return tokenizer.batch_decode(more, skip_special_tokens=True)


if __name__ == "__main__":
    for text in main():
        print(repr(text))
