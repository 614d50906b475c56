"""verify: tests a model on this machine: logits with memory against logits without, K/V quality, doctor's diagnosis."""
