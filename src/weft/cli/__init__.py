"""The command line. torch is imported by the commands that need it, never by `--help`."""
