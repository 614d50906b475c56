"""transformers' own `model.generate()` on kvcellar's cells. Run it: python examples/generate.py

The embedded model goes on from a batch of two prompts by greedy search, from where it was, and by beam search; the text
is what transformers' own cache gives.
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcellar.models import embedded
from kvcellar.models.generation import GenerationCache


def main() -> list[str]:
    """The greedy texts of both prompts."""
    path = embedded.path()
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=torch.float32)
    batch = tokenizer(["import os\nimport", "def main():\n"], return_tensors="pt", padding=True)
    how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    cache = GenerationCache.of(model, cells=512)
    ours = model.generate(**batch, past_key_values=cache, **how)
    assert torch.equal(ours, model.generate(**batch, **how)), "our cells gave another text than transformers' cache"
    free = min(cache.memory.free().values())
    print(f"after greedy search: {len(cache.rows)} rows of {cache.get_seq_length()} tokens, {free} cells free")
    more = model.generate(
        ours, attention_mask=torch.cat([batch["attention_mask"], torch.ones(2, 12, dtype=torch.long)], 1),
        past_key_values=cache, **how,
    )  # fmt: skip
    print(f"and on from there, reading nothing twice: {cache.get_seq_length()} tokens")
    cache.reset()
    beams = model.generate(**batch, past_key_values=cache, num_beams=3, **how)
    print(f"beam search, whose beams share their cells: {tokenizer.decode(beams[0], skip_special_tokens=True)!r}")
    return tokenizer.batch_decode(more, skip_special_tokens=True)


if __name__ == "__main__":
    for text in main():
        print(repr(text))
