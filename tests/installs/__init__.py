"""The wheel in fresh environments: what it brings, where it works, and which versions work together."""
