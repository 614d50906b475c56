"""frontend: what stands between texts and tokens; no torch. It imports of the engine only messages and what opens one.

The public `Engine`, its clients (a thread of this process, or a process of its own), requests built of chats and texts,
replies read token by token, conversations and sessions. Used by `serve`, the commands, and users' programs.
"""
