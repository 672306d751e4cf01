"""Hooks into the libraries that models are written in. Import the one that you use; `multiattn` imports none."""
