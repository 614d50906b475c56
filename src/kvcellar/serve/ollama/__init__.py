"""ollama: Ollama's API: generating, looking at models, and changing the library."""
