"""A link as a machine that does one thing after the other, in ticks; the oracle of mpitrain.emulate.links."""

from collections import deque


def departures(packets, bytes_a_tick, queue_bytes, ticks):
    """Send packets over a link; return in which tick each has left: None if it was dropped, or is still there.

    Parameters
    ----------
    packets : list of (tick, nbytes)
        When each comes, in order; sizes are whole multiples of what a tick sends.
    bytes_a_tick : list of int
        What each tick sends, one after the other and again from the first one.
    queue_bytes : int
        What may wait beside the packet that is being sent.
    ticks : int
        When to stop.
    """
    left = [None] * len(packets)
    queue, sending, coming = deque(), None, deque(enumerate(packets))
    for tick in range(ticks):
        while coming and coming[0][1][0] == tick:
            number, (_, nbytes) = coming.popleft()
            if sending is None:
                sending = [number, nbytes]
            elif sum(size for _, size in queue) + nbytes <= queue_bytes:
                queue.append((number, nbytes))
        room = bytes_a_tick[tick % len(bytes_a_tick)]
        if sending and room:
            sending[1] -= room
            if sending[1] <= 0:
                left[sending[0]] = tick + 1
                sending = list(queue.popleft()) if queue else None
    return left
