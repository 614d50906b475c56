"""adapters: low-rank changes of a model's weights, chosen for each sequence of a step."""
