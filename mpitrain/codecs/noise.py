"""Keys of the noise in stochastic rounding."""

_MASK = 2**64 - 1


def noise_key(*parts: int) -> int:
    """Mix integers (seed, step, rank …) into 64 bits; different parts give unrelated keys.

    The mixer is splitmix64 (Steele, Lea and Flood, 2014).
    """
    key = 0
    for part in parts:
        key = (key + (part & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        key = ((key ^ key >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        key = ((key ^ key >> 27) * 0x94D049BB133111EB) & _MASK
        key ^= key >> 31
    return key
