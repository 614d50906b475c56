"""cli: the `kvcellar` command, one file per subcommand. It parses options, formats output and configures logging."""
