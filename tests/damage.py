"""Seeded damage to bytes and to JSON: what a file may look like after a bad copy, or an attack."""

import json
from random import Random
from typing import Any

HEAD_BYTES = 4096

# Damage to bytes


def position(data: bytes, random: Random) -> int:
    """Most often near the start or the end, where formats have their structure."""
    near = random.randrange(min(len(data), HEAD_BYTES))
    return random.choice([near, near, len(data) - 1 - near, random.randrange(len(data))])


def flip_bits(data: bytes, random: Random) -> bytes:
    copy = bytearray(data)
    for _ in range(random.choice([1, 1, 3, 20])):
        copy[position(data, random)] ^= 1 << random.randrange(8)
    return bytes(copy)


def set_bytes(data: bytes, random: Random) -> bytes:
    copy = bytearray(data)
    for _ in range(random.choice([1, 1, 3, 20])):
        copy[position(data, random)] = random.randrange(256)
    return bytes(copy)


def cut(data: bytes, random: Random) -> bytes:
    return data[: position(data, random)]


def remove(data: bytes, random: Random) -> bytes:
    at = position(data, random)
    return data[:at] + data[at + random.randrange(1, 100) :]


def insert(data: bytes, random: Random) -> bytes:
    at = random.choice([position(data, random), len(data)])
    return data[:at] + random.randbytes(random.randrange(1, 100)) + data[at:]


def repeat(data: bytes, random: Random) -> bytes:
    at = position(data, random)
    return data[:at] + data[at : at + random.randrange(1, 200)] + data[at:]


def swap(data: bytes, random: Random) -> bytes:
    width = random.choice([1, 4, 8, 32, 100])
    first, second = sorted(position(data, random) for _ in range(2))
    if second < first + width:
        return set_bytes(data, random)
    left, right = data[first : first + width], data[second : second + width]
    return data[:first] + right + data[first + width : second] + left + data[second + width :]


def set_number(data: bytes, random: Random) -> bytes:
    """A size, count or offset that is too large, too small or one off."""
    width = random.choice([2, 4, 8])
    at = position(data, random)
    value = int.from_bytes(data[at : at + width], "little")
    edges = [0, 1, value + 1, value - 1, 2 * value, len(data), *(2**n for n in (31, 32, 62, 63))]
    number = random.choice([*edges, -1, -32]) % (1 << 8 * width)
    return data[:at] + number.to_bytes(width, random.choice(["little", "big"])) + data[at + width :]


BYTE_DAMAGE = (flip_bits, set_bytes, cut, remove, insert, repeat, swap, set_number)

# Damage to JSON

VALUES = ["0", "-1", "1", "2", "3", "0.5", "-0.0", "1e400", "-1e400", "1e-400", "NaN", "Infinity"]
VALUES += ["2147483648", "9223372036854775808", "null", "true", "false", '""', '"x"', '"linear"']
VALUES += ['"llama3"', '"yarn"', "[]", "{}", "[[]]", "[1]", '{"a":1}', '"\\ud800"', '"\\u0000"']
VALUES += ["9" * 5000, "[" * 2000, "1" + "0" * 30, '"' + "y" * 3000 + '"', '{"type": "linear"}']


def damage_json(text: bytes, random: Random) -> bytes:
    """Another value for a key, a key gone, twice or renamed, two values swapped; or bytes."""
    try:
        table = json.loads(text)
    except ValueError:
        return random.choice(BYTE_DAMAGE)(text, random)
    while True:
        key = random.choice(list(table)) if isinstance(table, dict) and table else None
        inner = table[key] if key is not None else None
        if not isinstance(inner, dict) or not inner or random.random() < 0.3:
            break
        table = inner
    kind = random.choice(["value", "value", "value", "gone", "twice", "name", "swap", "bytes"])
    if key is None or kind == "bytes":
        return random.choice(BYTE_DAMAGE)(text, random)
    encoded = json.dumps(key).encode()
    start = text.find(encoded)
    value = json.dumps(inner).encode()
    at = text.find(value, start)
    if start < 0 or at < 0:
        return random.choice(BYTE_DAMAGE)(text, random)
    end = at + len(value)
    changes = {
        "value": lambda: text[:at] + random.choice(VALUES).encode() + text[end:],
        "gone": lambda: text[:start] + b'"gone": ' + text[at:],
        "twice": lambda: text[:start] + encoded + b": 1, " + text[start:],
        "name": lambda: text[:start] + random.choice([b'""', b'"x"', b"1"]) + text[at - 2 :],
        "swap": lambda: swap_values(text, (at, end), random),
    }
    return changes[kind]()


def swap_values(text: bytes, place: tuple[int, int], random: Random) -> bytes:
    """The value at `place`, and whatever stands between two separators further on."""
    start, end = place
    other = text.find(b": ", random.randrange(end, len(text) + 1))
    stop = min((at for at in (text.find(c, other) for c in (b",", b"}")) if at > 0), default=-1)
    if other < 0 or stop < other:
        return text[:start] + b"1" + text[end:]
    return (
        text[:start]
        + text[other + 2 : stop]
        + text[end : other + 2]
        + text[start:end]
        + text[stop:]
    )


def damage_safetensors(data: bytes, random: Random) -> bytes:
    """The header as JSON, with its length put right; or bytes anywhere."""
    if random.random() < 0.5:
        return random.choice(BYTE_DAMAGE)(data, random)
    header = json.dumps(header_of(data)).encode()
    return with_header(data, damage_json(header, random))


def damage_quantized(data: bytes, random: Random) -> bytes:
    """The settings in the metadata, themselves JSON, or as `damage_safetensors`."""
    if random.random() < 0.5:
        return damage_safetensors(data, random)
    header = header_of(data)
    metadata = header["__metadata__"]
    for key, text in metadata.items():
        metadata[key] = damage_json(text.encode(), random).decode(errors="replace")
    return with_header(data, json.dumps(header).encode())


def header_of(data: bytes) -> dict[str, Any]:
    """Of a safetensors file."""
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def with_header(data: bytes, header: bytes) -> bytes:
    end = 8 + int.from_bytes(data[:8], "little")
    return len(header).to_bytes(8, "little") + header + data[end:]


def damage_bytes(data: bytes, random: Random) -> bytes:
    return random.choice(BYTE_DAMAGE)(data, random)
