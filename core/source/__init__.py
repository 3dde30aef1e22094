"""Pending sources: messages are opened, then confirmed or aborted."""
