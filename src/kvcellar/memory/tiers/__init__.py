"""tiers: where snapshots are kept outside of the device: host memory, a disk, a store elsewhere.

One index for what is where, a codec, and transfers on threads of their own; no torch.
Used by the store of a memory, and by commands that look at a store without an engine.
"""
