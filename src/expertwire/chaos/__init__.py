"""Chaos plans: a small system under load whose servers are killed, stopped, drained and joined."""
