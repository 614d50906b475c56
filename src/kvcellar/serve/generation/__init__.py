"""generation: the one way from a request of any API to its response, and the fields that APIs share."""
