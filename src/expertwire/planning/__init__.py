"""How many servers a model needs, and what a step will take."""
