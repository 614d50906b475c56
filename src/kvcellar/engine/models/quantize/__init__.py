"""quantize: weights in fewer bits: making them, describing them, and computing with them."""
