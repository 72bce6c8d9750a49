"""The output of ranks on its way into a cell: routed, folded, rendered as text and HTML, published; and errors."""
