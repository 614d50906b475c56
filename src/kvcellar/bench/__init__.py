"""bench: measures kvcellar against transformers on the same weights, and the cost of single operations."""
