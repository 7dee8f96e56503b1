"""An expert server: take messages, batch them, run experts, reply."""
