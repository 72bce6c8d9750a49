"""Reload that reaches live code: after a sync, what ranks have imported follows the files, in one of three ways."""
