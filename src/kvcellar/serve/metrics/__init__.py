"""metrics: the state of a server for Prometheus: counts of requests, and what `stats()` of each engine has."""
