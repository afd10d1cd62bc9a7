"""`python -m moequant` and the script `moequant`: the command line."""

import sys
from pathlib import Path

_IN_CHECKOUT = (
    f"{Path(__file__).parent}: part of a checkout, which hides the installed package from `python "
    "-m moequant` in this folder; use the command `moequant`, or start Python in another folder"
)
"""In a checkout, cli/ and kernels/ lie beside this package; installed, inside it."""


def main() -> None:
    """Run the command line; what interrupts its imports, which take 0.1 s, ends it as later."""
    try:
        from moequant.cli import main as run
    except KeyboardInterrupt:
        sys.stderr.write("Error: interrupted\n")
        sys.exit(130)
    except ModuleNotFoundError as error:
        if error.name != "moequant.cli":
            raise
        sys.stderr.write(f"Error: {_IN_CHECKOUT}\n")
        sys.exit(1)
    run()


if __name__ == "__main__":
    main()
