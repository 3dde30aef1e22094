"""Stormproof: trident/cli."""
