"""JSON is read as it is written, or refused with the place."""

import json

import pytest

from strict_json import json_object


@pytest.mark.parametrize(
    "values", [{}, {"a": [1, -2.5, None, True, {"b": "é\U0001f999"}]}], ids=str
)
def test_an_object_comes_back(values):
    assert json_object(json.dumps(values).encode()) == values
    assert json_object(json.dumps(values, ensure_ascii=False, indent=1).encode()) == values


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"", "is not JSON"),
        (b"[1]", "is not a JSON object"),
        (b'{"a": 1, "b": 2, "a": 3}', '"a" occurs twice'),
        (b'{"a": {"b": 1, "b": 1}}', '"b" occurs twice'),
        (b'{"a": NaN}', "a is nan; a finite"),
        (b'{"b": {"a": -1e999}}', "a is -inf; a finite"),
        (b'{"a": "\xff"}', "is not JSON .*position 7"),
        (b"\xef\xbb\xbf{}", "is not JSON .*BOM"),
        ('{"a": 1}'.encode("utf-16"), "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"a": ' + b"9" * 1_000_000 + b"}", "is not JSON .*digits"),
        (b'{"a": 1} x', "is not JSON .*column 10"),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_anything_else_is_refused_with_its_cause(data, cause):
    with pytest.raises(ValueError, match=cause):
        json_object(data)
