"""heads: networks that draft on the states of a model, and whether they fit it."""
