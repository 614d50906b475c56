"""The trainer of the embedded demo model: corpus, tokenizer, network, optimiser, loop, export and card."""
