"""text: text to token ids and back. `tokens` is the tokenizer, `output` the text of a completion token by token,
`template` the chat template; `conversation` checks messages, `calls` converts tool calls, `sandbox` runs the template;
`pieces` are what a reply is made of.
"""
