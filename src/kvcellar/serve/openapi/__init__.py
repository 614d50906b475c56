"""openapi: the document of all routes, from the models that check their requests."""
