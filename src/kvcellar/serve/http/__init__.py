"""http: the server itself: connections, limits, keys, bodies, errors, the log."""
