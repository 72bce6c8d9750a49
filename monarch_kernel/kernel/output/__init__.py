"""What ranks put out, on its way into a cell: routed, folded, rendered as text and HTML, published; errors, too."""
