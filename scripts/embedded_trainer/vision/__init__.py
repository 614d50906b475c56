"""Trains the embedded model that sees, on pictures that are drawn here and questions that are written for them."""
