"""A memory under `model.generate()` of transformers. Run it: python examples/generate.py

A small network with sliding and full attention completes a batch of two prompts by greedy search, continues them, and
completes them by beam search; the tokens equal those with the cache of transformers. A second memory, as after a
restart, reads what the first has stored in a directory. Its weights are random, so the text means nothing: replace it
with your model.
"""

import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig, PreTrainedModel

import kvcellar
from kvcellar.engine.models import embedded


def network(vocabulary: int) -> PreTrainedModel:
    """Four layers; every other one has a window of 16 tokens."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=16, layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=512, eos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def main(store: str) -> list[str]:
    """The greedy texts of both prompts."""
    tokenizer = AutoTokenizer.from_pretrained(embedded.path(), local_files_only=True, padding_side="left")
    model = network(len(tokenizer))
    batch = tokenizer(["import os\nimport", "def main():\n"], return_tensors="pt", padding=True)
    how = {"max_new_tokens": 70, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**batch, **how)
    with kvcellar.attach(model, cache_bytes=1 << 26, store=store) as memory:
        texts = model.generate(**batch, past_key_values=memory.cache(), **how)
        assert torch.equal(texts, expected), "the tokens differ from those with the cache of transformers"
        longer = {
            "input_ids": texts,
            "attention_mask": torch.cat([batch["attention_mask"], torch.ones(2, 70)], 1).long(),
        }
        cache = memory.cache()
        more = model.generate(**longer, past_key_values=cache, **how)
        print("a longer prompt read", *(f"{one.restored} of {one.asked} tokens" for one in cache.recalls))
        beams = model.generate(**batch, past_key_values=memory.cache(), num_beams=3, **how)
        print(f"beam search: {tokenizer.decode(beams[0], skip_special_tokens=True)!r}")
    with kvcellar.attach(model, cache_bytes=1 << 26, store=store) as memory:
        cache = memory.cache()
        assert torch.equal(model.generate(**longer, past_key_values=cache, **how), more)
        print("after a restart:", *(str(one.sources) for one in cache.recalls))
    return tokenizer.batch_decode(more, skip_special_tokens=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        for text in main(directory):
            print(repr(text))
