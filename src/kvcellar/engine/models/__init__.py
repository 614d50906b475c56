"""models: load a transformers model, find which K/V and state it stores, and run it on our memory.

No other package but `bench/hf_baseline.py` imports transformers.
"""
