"""What the fork server has loaded before it forks: all that a driver without Spark needs. It starts no threads."""

import stormproof.trident.run  # noqa: F401
import support.topologies  # noqa: F401
