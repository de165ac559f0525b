"""`python -m dustin`, and what the script `dustin` calls."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C while its modules are still read ends as quietly as later."""
    try:
        from dustin.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
