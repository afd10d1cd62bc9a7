"""The command line: options in, one library call, exit code out."""
