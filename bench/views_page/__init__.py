"""The views in a browser with a simulated kernel: how soon they paint, how smoothly they scroll, and how they look."""
