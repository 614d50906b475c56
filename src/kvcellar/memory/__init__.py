"""memory: what models remember, usable alone, without a model or an engine. The lowest of three floors.

`memory.Memory` is one memory: sequences in cells, in steps that are begun, committed or abandoned; `prefix_cache`
keeps what they computed, `store` what is in tiers, `restores` reads it back. The folders: `cells` counts in integers,
`kv` has the tensors, `attention` reads them, `prefix` finds what was computed before, and `tiers` keeps it outside of
the device.
It imports nothing of the floors above; engines, `verify` and users' own loops import it.
"""
