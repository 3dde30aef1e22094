"""Stormproof: trident."""
