"""cli: the `kvcellar` command. It parses options, formats output and configures logging."""
