"""The debugger in a terminal: `server` runs in the controller, `client` is `monarch-kernel debug`."""
