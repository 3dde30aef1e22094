"""A server that speaks Kestrel's protocol, for tests and for the example of a Kestrel source."""
