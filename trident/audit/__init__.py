"""Stormproof: trident/audit."""
