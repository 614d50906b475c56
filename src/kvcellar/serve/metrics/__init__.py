"""metrics: Prometheus' text format, made of what engines and the server count."""
