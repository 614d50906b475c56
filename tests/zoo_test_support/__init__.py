"""What the zoo is built from: small sizes, initial weights, and a sweep over every causal model type."""
