"""Hand-written layers: numpy forward and backward passes with explicit caches."""
