"""speculate: drafts of the next tokens, their verification, and how many are worth their time."""
