"""admin: routes for those who run a server: health, the cache, conversations, records of requests."""
