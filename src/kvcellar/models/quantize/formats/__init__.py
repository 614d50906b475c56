"""formats: the forms in which weights files store quantised weights, each read into dense tensors."""
