"""A registry and expert servers from one YAML file: on this host, or on a Ray cluster."""
