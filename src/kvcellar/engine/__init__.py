"""engine: serves tokens. Settings, requests, the scheduler, the runner of a step, the loop that owns the device."""
