"""models: which models a server has, which are loaded, and the use of one by a request."""
