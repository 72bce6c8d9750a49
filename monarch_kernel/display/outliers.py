"""Find the outliers among many numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

#: A number stands out if its distance from the median is this many times the median distance.
OUTLIER = 6.0
#: Among fewer numbers than this, none stands out.
_FEWEST = 4


def outliers(numbers: Mapping[int, float]) -> list[int]:
    """Return the keys of outliers, sorted: numbers far from the median, or not finite while most others are.

    At most a quarter of the numbers are outliers. A larger share is another group, and not an exception.
    """
    if len(numbers) < _FEWEST:
        return []
    finite = {key: number for key, number in numbers.items() if math.isfinite(number)}
    found = [key for key in numbers if key not in finite]
    if finite:
        middle = statistics.median(finite.values())
        gaps = {key: abs(number - middle) for key, number in finite.items()}
        spread = statistics.median(gaps.values())
        # If most numbers are equal, rounding must not make the others outliers.
        least = max(OUTLIER * spread, 1e-9 * abs(middle))
        found += [key for key, gap in gaps.items() if gap > least]
    return sorted(found) if len(found) * 4 <= len(numbers) else []
