"""kv: what is in the cells: pools of tensors, K/V written and read, quantised storage, recurrent states; and who holds
them: sequences and claims.

Used by `memory.Memory`; others see plans, claims and readings only.
"""
