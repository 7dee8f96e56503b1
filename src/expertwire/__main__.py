"""`python -m expertwire` is the same as the `expertwire` command."""

from .cli.app import main

if __name__ == "__main__":
    main()
