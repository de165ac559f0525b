"""`python -m dustin`."""

from dustin.cli import main

if __name__ == "__main__":
    main()
