"""engine: tokens in, tokens out. The middle floor: it runs models on memory, and knows neither HTTP nor chats.

`messages` is what an engine and its clients say to each other; with the plain records beside it, it is all that the
floor above imports, but for what opens an engine. The folders: `core` (the loop and the steps), `control`, `load`
(opening and sizing), `models`, `recording`, `sample`, `speculate`.
"""
