"""models: load a transformers model, find which K/V and state it stores, and run it on our memory.

Besides this package, only `recording/capture.py` and `bench/hf_baseline.py` import transformers.
"""
