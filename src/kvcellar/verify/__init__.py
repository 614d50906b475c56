"""verify: measures a model on this machine. Warm answers against cold ones, K/V quality, doctor's diagnosis."""
