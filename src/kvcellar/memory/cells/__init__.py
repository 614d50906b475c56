"""cells: which cells and state rows are whose, in integers and NumPy; no torch.

Runs of cells, tables of sequences, rows, layouts (what a query sees and what is kept), compaction.
Used by `kv`, and by probes that compare a layout with a model's masks.
"""
