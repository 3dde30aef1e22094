"""Stormproof: migrations."""
