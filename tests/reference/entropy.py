"""Twin of ecq and of coded integers: the range coder with Python's integers, and readers of whole payloads."""

import struct

import numpy as np

TOTAL, LOWEST, BLOCK, ZERO = 4096, 1 << 15, 4096, 128


def lane_of(index, size, lanes):
    """Tell the coder of a symbol: whole rows of eight in turn, the rest all to the first."""
    return index % lanes if index < size // lanes * lanes else 0


def starts_of(freqs):
    return [sum(freqs[:symbol]) for symbol in range(len(freqs))]


def encode(codes, lanes, models, tables):
    """Return (words, states): x becomes x // f * 4096 + start + x % f, less 16 bits where too large."""
    states, words = [LOWEST] * 8, []
    starts = [starts_of(freqs) for freqs in tables]
    for index, symbol in enumerate(codes):
        model, lane = models[index // BLOCK], lane_of(index, len(codes), lanes)
        freq, x = tables[model][symbol], states[lane]
        if x >= freq * 2**31 // TOTAL:
            words.append(x % 2**16)
            x //= 2**16
        states[lane] = x // freq * TOTAL + starts[model][symbol] + x % freq
    return words, states


def decode(words, states, size, lanes, models, tables):
    """Return the symbols; the last was coded last and comes first."""
    words, states, codes = list(words), list(states) + [LOWEST] * (8 - len(states)), []
    symbols = [np.repeat(np.arange(256), freqs).tolist() for freqs in tables]
    starts = [starts_of(freqs) for freqs in tables]
    for index in reversed(range(size)):
        model, lane = models[index // BLOCK], lane_of(index, size, lanes)
        x = states[lane]
        symbol = symbols[model][x % TOTAL]
        x = tables[model][symbol] * (x // TOTAL) + x % TOTAL - starts[model][symbol]
        states[lane] = x if x >= LOWEST else x * 2**16 + words.pop()
        codes.append(symbol)
    assert not words
    assert states == [LOWEST] * 8
    return codes[::-1]


def parametric(shape, last, zero, tail, escape):
    """Frequencies of a geometric (0) or Gaussian (1) model, in 31-bit fixed point."""
    weights, weight = [], 2**31
    base = 65536 - tail**2
    growth = base * base // 2 if shape else 2**31
    ratio = growth * base // 2**16 if shape else tail * 2**23
    for _ in range(last):
        weights.append(weight)
        weight, ratio = weight * ratio // 2**31, ratio * growth // 2**31
    share = max((16 * (256 - zero) - 2 * last - escape) // 2, 0)
    side = [1 + w // 256 * share // (sum(weights) // 256) for w in weights]
    freqs = [0] * 256
    freqs[0] = escape
    freqs[ZERO + 1 : ZERO + 1 + last] = side
    freqs[ZERO - last : ZERO] = side[::-1]
    freqs[ZERO] = TOTAL - sum(freqs)
    return freqs


class Payload:
    def __init__(self, data):
        self.data = data

    def take(self, layout):
        size = struct.calcsize("<" + layout)
        head, self.data = self.data[:size], self.data[size:]
        return struct.unpack("<" + layout, head)

    def model(self, escape):
        shape, last = self.take("BB")
        if shape < 2:
            return parametric(shape, last, *self.take("BB"), escape)
        freqs = [0] * 256
        for symbol in [*range(ZERO - last, ZERO), *range(ZERO + 1, ZERO + last + 1), *[0] * escape]:
            (freq,) = self.take("B")
            freqs[symbol] = freq if freq < 128 else freq - 128 + 128 * self.take("B")[0]
        freqs[ZERO] = TOTAL - sum(freqs)
        return freqs


def values(codes, step, first, more, escapes):
    """Reconstruct: every step is exact in float64 but the last, to float32."""
    codes = np.array(codes) - ZERO
    shifts = np.where(np.abs(codes) == 1, first, np.where(codes == 0, 0, more)) / 256
    out = (np.sign(codes) * (np.abs(codes) + shifts) * np.float64(step)).astype(np.float32)
    out[codes == -ZERO] = escapes
    return out


def decode_ecq(data, size):
    """Return the float32 values of a payload that an encoder wrote."""
    payload = Payload(data)
    (kind,) = payload.take("B") if size else (0,)
    if kind == 0:
        assert payload.data == b""
        return np.zeros(size, np.float32)
    if kind == 1:
        return (np.frombuffer(payload.data, "<u2").astype(np.uint32) << 16).view(np.float32)
    number_of_models, step, first, more = payload.take("BHbb")
    (number,) = payload.take("I") if kind == 3 else (0,)
    tables = [payload.model(int(kind == 3)) for _ in range(number_of_models)]
    blocks, lanes = -(-size // BLOCK), 8 if size >= 16384 else 1
    models = payload.take(f"{blocks}B") if number_of_models > 1 else [0] * blocks
    escapes, states = payload.take(f"{number}f"), payload.take(f"{lanes}I")
    words = np.frombuffer(payload.data, "<u2").tolist()
    codes = decode(words, states, size, lanes, models, tables)
    step = np.array([step << 16], np.uint32).view(np.float32)[0]
    return values(codes, step, first, more, escapes)


def decode_coded(data, split, codes, zero):
    """Return the payload without the coder: ``split`` bytes of scales, and ``codes`` bytes of codes."""
    if data[-1:] == b"\0":
        return data[:-1]
    assert data[-1:] == b"\1"
    payload = Payload(data[split:-1])
    table, lanes = payload.model(0), 8 if codes >= 16384 else 1
    states = payload.take(f"{lanes}I")
    words = np.frombuffer(payload.data, "<u2").tolist()
    symbols = decode(words, states, codes, lanes, [0] * -(-codes // BLOCK), [table])
    return data[:split] + bytes(symbol ^ zero for symbol in symbols)
