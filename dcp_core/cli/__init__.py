"""The command line: `dcp COMMAND`. Each command is a module of this package; `main` holds the table of them."""
