"""`python -m moequant`: the command line."""

from moequant.cli import main

main()
