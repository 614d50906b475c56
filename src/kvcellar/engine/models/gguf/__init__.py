"""gguf: models from GGUF files, made into directories that everything else reads."""
