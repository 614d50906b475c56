"""quantize: weights in fewer bits, in the layouts of compressed-tensors: read, written and measured."""
