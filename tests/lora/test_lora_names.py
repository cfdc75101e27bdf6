"""Names of adapters."""

from __future__ import annotations

import pytest

from loraserve.errors import AdapterRefused
from loraserve.lora.names import AdapterName, check_name, parse_name


@pytest.mark.parametrize("name", ["a", "A9", "sql-4.1_x", "org/name", "0/0", "a" * 128, "a" * 128 + "/" + "b" * 128])
def test_legal(name: str) -> None:
    assert check_name(name) == name
    assert parse_name(name) == AdapterName(name)
    assert str(parse_name(f"{name}@0123abcd")) == f"{name}@0123abcd"


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".a",
        "-a",
        "_a",
        "a b",
        "a/b/c",
        "/a",
        "a/",
        "a/.b",
        "../a",
        "a" * 129,
        "a:b",
        "a@b",
        "ä",
        "a\n",
        "a\0",
        "\ud800",
    ],
)
def test_illegal(name: str) -> None:
    with pytest.raises(AdapterRefused) as caught:
        check_name(name)
    assert (caught.value.code, caught.value.http_status) == ("invalid_name", 400)
    assert caught.value.message.isprintable()


@pytest.mark.parametrize("text", ["a@", "a@123", "a@xyz1", "a@ABCD", "a@" + "0" * 65, "a@0123@4567", "@0123"])
def test_illegal_prefix(text: str) -> None:
    with pytest.raises(AdapterRefused) as caught:
        parse_name(text)
    assert caught.value.code == "invalid_name"
