"""text: words to ids and back. `tokens` encodes and decodes, `stream` decodes as it comes, `stops` finds where to stop,
`template` writes a conversation the way a model was taught to read it.
"""
