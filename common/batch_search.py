"""The search for the largest batch that fits: which size to try next, and where more brings no more speed."""

FIRST = 8  # images; fewer leave hardly a trace beside weights and libraries
SHY = 0.9  # of the way, where a line is followed further than it was measured
WORTH = 1.05  # images/s of a larger batch, against those of a smaller one


def next_size(ran: dict[int, float], failed: set[int], limit_gib: float, quantum: int) -> int | None:
    """The size to try next, a multiple of quantum; None when quantum more than what ran last has failed.

    ran: GiB that each size took, taken to be a line, a + b * size. failed: the sizes that did not fit. Where
    the line is wrong, the steps away from it double, up to the middle of what is not known.
    """
    low = max(ran, default=0)
    if not failed:
        return _larger(ran, limit_gib, quantum)
    high = min(failed)
    if high - low <= quantum:
        return None
    middle = low + max(1, (high - low) // (2 * quantum)) * quantum
    if len(ran) < 2:
        sure = _sure(ran, limit_gib, quantum)
        return sure if low < sure < high else middle
    predicted = _larger(ran, limit_gib, quantum)
    return predicted if predicted < high else max(middle, high - quantum * 2 ** (len(failed) - 1))


def _larger(ran: dict[int, float], limit_gib: float, quantum: int) -> int:
    """The largest size that should fit, by what was measured; more than what ran in any case."""
    if not ran:
        return max(1, FIRST // quantum) * quantum
    small, low = min(ran), max(ran)
    if small == low:
        return max(4 * low, _sure(ran, limit_gib, quantum))
    image_gib = (ran[low] - ran[small]) / (low - small)
    if image_gib <= 0:
        return 4 * low
    room = (limit_gib - ran[low]) / image_gib + 1e-6  # images; what fits exactly does fit
    if room > low - small:
        room *= SHY
    if room >= quantum:
        return low + int(room / quantum) * quantum
    # Nothing more should fit. Where that was so before, more than once, and more did fit, the step grows.
    full = sum(gib + quantum * image_gib > limit_gib for gib in ran.values())
    return low + quantum * 2 ** max(0, full - 2)


def _sure(ran: dict[int, float], limit_gib: float, quantum: int) -> int:
    """So much fits even if all that the largest took were its images; 0 where none ran."""
    low = max(ran, default=0)
    return int(low * limit_gib / ran[low]) // quantum * quantum if low else 0


def knee(images_per_s: dict[int, float]) -> int:
    """The smallest size against which no other is 5 percent faster."""
    best = max(images_per_s.values())
    return min(size for size, speed in images_per_s.items() if best < WORTH * speed)
