"""attention: how do new tokens look back? Tensors and a plan in, tensors out. One file per backend."""
