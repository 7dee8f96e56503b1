"""The `expertwire` command."""
