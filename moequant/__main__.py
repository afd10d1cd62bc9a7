"""`python -m moequant` and the script `moequant`: the command line."""

import sys


def main() -> None:
    """Run the command line; what interrupts its imports, which take 0.1 s, ends it as later."""
    try:
        from moequant.cli import main as run
    except KeyboardInterrupt:
        sys.stderr.write("Error: interrupted\n")
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
