"""Hooks into the libraries that models are written in; each is imported by its user alone."""
