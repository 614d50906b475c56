"""recording: trace the forward of a flat guest once, and replay it as a list of operators."""
