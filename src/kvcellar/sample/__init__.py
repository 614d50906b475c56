"""sample: which token next? Parameters, processors, and the draw itself."""
