"""The views in a browser with a simulated kernel: how soon they paint, how evenly they scroll, and how they look."""
