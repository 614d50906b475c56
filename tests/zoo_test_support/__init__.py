"""What the zoo is built from: small sizes, weights that matter, and a sweep over every causal model type."""
