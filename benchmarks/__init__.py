"""benchmarks: what maintainers measure of kvcellar, part by part; `python -m benchmarks`. Not in the wheel."""
