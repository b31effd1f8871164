"""The built-in models. Tasks import it."""
