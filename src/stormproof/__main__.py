"""`python -m stormproof` is the command line."""

from __future__ import annotations

from stormproof.trident.cli import main

if __name__ == "__main__":
    main()
