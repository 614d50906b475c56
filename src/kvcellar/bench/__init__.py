"""bench: how fast is it here, beside transformers on the same weights? Workloads, measures, reports."""
