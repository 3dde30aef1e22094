"""The acker framework: messages, shares, topologies, pending sources and the engines that run them."""
