"""Figures for people: bytes, seconds, counts."""


def show_bytes(num_bytes: float) -> str:
    """`1536` -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(num_bytes) < 1024 or unit == "TiB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("unreachable")


def show_count(count: float) -> str:
    """`3450000` -> `3.45 M`."""
    for unit in ("", " k", " M", " G", " T", " P"):
        if abs(count) < 1000 or unit == " P":
            return f"{count:.4g}{unit}"
        count /= 1000
    raise AssertionError("unreachable")


def show_seconds(seconds: float) -> str:
    """`0.0123` -> `12.3 ms`, `75` -> `1 min 15 s`."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60 or not seconds < 1e12:  # not finite, or beyond any clock
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def show_share(share: float) -> str:
    """`0.255` -> `25.5%`, `0.000213` -> `0.021%`: nothing that is there reads as 0."""
    return f"{share:.1%}" if share == 0 or abs(share) >= 0.01 else f"{100 * share:.2g}%"
