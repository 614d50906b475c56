"""Images in prompts: decoded and prepared for a model in a process with limits, and named in keys of memory."""
