"""What a system is doing: reports, status, metrics, the registry's page."""
