"""Hooks into other libraries. Each module registers something when it is imported; nothing here is imported unasked."""
