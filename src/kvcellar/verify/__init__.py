"""verify: measures a model on this machine. Warm logits against cold ones, K/V quality, doctor's diagnosis."""
