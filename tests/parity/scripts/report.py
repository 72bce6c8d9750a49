"""How the scripts report. Their lines begin with ``> ``, so that what else is printed does not matter."""


def show(*parts):
    """Print one result."""
    print("> " + " ".join(str(part) for part in parts), flush=True)


def raises(what, kind, attempt):
    """Print whether it raises this kind of exception (ours may be of several kinds at once)."""
    try:
        attempt()
    except BaseException as e:
        show(f"{what}:", kind.__name__ if isinstance(e, kind) else type(e).__name__)
    else:
        show(f"{what}: nothing was raised")


def check(what, attempt, *kinds):
    """Print a result, or which of these kinds the exception that it raises is."""
    try:
        result = attempt()
    except BaseException as e:
        show(f"{what}:", next((kind.__name__ for kind in kinds if isinstance(e, kind)), type(e).__name__))
    else:
        show(f"{what}: {result!r}")
