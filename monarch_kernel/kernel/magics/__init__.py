"""`%mesh` and `%%mesh`: the subcommands, their arguments, and their completion."""
