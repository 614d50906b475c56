"""text: text to token ids and back. `tokens` is the tokenizer, `output` the text of a completion token by token,
`template` the chat template, which `rendering` runs; `conversation` checks messages, `calls` converts tool calls;
`replay` finds the tokens of earlier replies in `turns`; `pieces` are what a reply is made of.
"""
