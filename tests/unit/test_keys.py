"""API keys: key files, lookup, and cache salts."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from weft.errors import InvalidRequestError
from weft.request import Priority
from weft.server.admission.keys import ApiKey, KeyRing, all_keys, plain_keys, read_key_file


def write(tmp_path: Path, text: str, name: str = "keys.toml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def test_keys_of_a_plain_file_are_named_by_their_lines(tmp_path: Path) -> None:
    keys = read_key_file(write(tmp_path, "# ours\n\n  one \ntwo=2\n", "keys.txt"))
    assert [(key.name, key.key_sha256) for key in keys] == [
        ("line-3", digest("one")),
        ("line-4", digest("two=2")),
    ]


@pytest.mark.parametrize("in_file", [True, False])
def test_a_single_plain_key_may_use_high_but_not_critical(tmp_path: Path, in_file: bool) -> None:
    path = write(tmp_path, "one\n", "keys.txt") if in_file else None
    (alone,) = all_keys([] if in_file else ["one"], path)
    assert alone.max_priority is Priority.HIGH
    table = write(tmp_path, f'[[key]]\nname = "t"\nkey_sha256 = "{digest("t")}"\n')
    several = [*all_keys(["two", "three"], path), *all_keys(["two"], table)]
    assert {key.max_priority for key in several} == {Priority.NORMAL}
    assert all_keys([], table)[0].max_priority is Priority.NORMAL


def test_critical_is_granted_in_a_table(tmp_path: Path) -> None:
    text = f'[[key]]\nname = "t"\nkey_sha256 = "{digest("t")}"\nmax_priority = "critical"\n'
    assert all_keys(["one"], write(tmp_path, text))[1].max_priority is Priority.CRITICAL


def test_the_salt_of_a_key_has_at_most_256_characters() -> None:
    assert ApiKey("a", "0" * 64, cache_salt="s" * 256).cache_salt == "s" * 256
    with pytest.raises(
        InvalidRequestError, match="cache_salt is '257 characters'; allowed: text of 1 to 256"
    ):
        ApiKey("a", "0" * 64, cache_salt="s" * 257)


@pytest.mark.parametrize("name", ["keys.toml", "keys.txt"])
def test_a_key_table_sets_all_fields_of_a_key(tmp_path: Path, name: str) -> None:
    text = f"""
# The keys of this server.
[[key]]
name = "alice"
key = "secret"
requests_per_minute = 60
tokens_per_minute = 100_000
concurrent = 4
max_priority = "high"
cache_salt = "team"
weight = 2
admin = true

[[key]]
name = "bob"
key_sha256 = "{digest("other")}"
"""
    alice, bob = read_key_file(write(tmp_path, text, name))
    assert alice == ApiKey("alice", digest("secret"), 60, 100_000, 4, Priority.HIGH, "team", 2, True)
    assert bob == ApiKey("bob", digest("other"), max_priority=Priority.NORMAL)
    assert "secret" not in repr(alice)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("requests_per_minute = -1", "requests_per_minute is -1"),
        ("requests_per_minute = 1.5", "requests_per_minute is 1.5"),
        ("tokens_per_minute = true", "tokens_per_minute is True"),
        ("concurrent = 0", "concurrent is 0"),
        ('max_priority = "urgent"', "allowed: low, normal, high, critical"),
        ("max_priority = 3", "max_priority is 3"),
        ("weight = 0", "weight is 0"),
        ("weight = nan", "weight is nan"),
        ('cache_salt = ""', "cache_salt is ''"),
        ('admin = "yes"', "admin is 'yes'"),
        ("rpm = 3", "'rpm' is unknown"),
        ('key_sha256 = "00"', "either key or key_sha256"),
    ],
)
def test_an_error_in_a_key_table_has_its_line_and_field(tmp_path: Path, line: str, expected: str) -> None:
    text = f'[[key]]\nname = "first"\nkey = "a"\n\n[[key]]\nname = "second"\nkey = "hidden"\n{line}\n'
    with pytest.raises(InvalidRequestError) as caught:
        read_key_file(write(tmp_path, text))
    message = str(caught.value)
    assert "keys.toml" in message and "key 2, line 5" in message and expected in message
    assert "hidden" not in message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "no key"),
        ("[[key]]\nname = \n", "line 2"),
        ("[keys.alice]\nkey = 'a'\n", "'keys' is unknown"),
        ("[key]\nname = 'a'\n", r"write \[\[key\]\]"),
        ("[[key]]\nkey = 'a'\n", "name is missing"),
        ("[[key]]\nname = 'a b'\nkey = 'a'\n", "name is 'a b'"),
        ("[[key]]\nname = 'a'\n", "either key or key_sha256"),
        ("[[key]]\nname = 'a'\nkey = ' a'\n", "spaces around"),
        ("[[key]]\nname = 'a'\nkey_sha256 = 'zz'\n", "64 hexadecimal digits"),
        ("[[key]]\nname = 'a'\nkey = 'x'\n[[key]]\nname = 'a'\nkey = 'y'\n", "have the same name"),
        ("[[key]]\nname = 'a'\nkey = 'x'\n[[key]]\nname = 'b'\nkey = 'x'\n", "'a' and 'b', are the same key"),
    ],
)
def test_an_invalid_key_file_is_refused_with_the_reason(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(InvalidRequestError, match=expected):
        read_key_file(write(tmp_path, text))


def test_the_error_for_a_missing_key_file_has_its_path(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"nowhere\.toml"):
        read_key_file(tmp_path / "nowhere.toml")


def test_plain_keys_are_numbered_and_none_is_empty() -> None:
    assert [key.name for key in plain_keys(["a", "b"])] == ["key-1", "key-2"]
    with pytest.raises(InvalidRequestError, match="API key 2 is empty"):
        plain_keys(["a", " "])


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (b"Bearer one", "key-1"),
        (b"bearer  two ", "key-2"),
        (b"Bearer on", None),
        (b"Basic one", None),
        (b"one", None),
        (b"", None),
    ],
)
def test_a_key_is_found_only_by_its_complete_secret(header: bytes, found: str | None) -> None:
    key = KeyRing(plain_keys(["one", "two"])).find(header)
    assert (key.name if key else None) == found


def test_no_salt_reaches_the_cache_of_another_key() -> None:
    one, two = plain_keys(["one", "two"])
    team, mates = ApiKey("a", digest("a"), cache_salt="team"), ApiKey("b", digest("b"), cache_salt="team")
    salts = ["", "x", one.key_sha256, "team", "('own', 'x')", one.salt_for(""), team.salt_for("")]
    reached = [{key.salt_for(salt) for salt in salts} for key in (one, two, team)]
    assert all(len(each) == len(salts) for each in reached)
    assert not reached[0] & reached[1] and not reached[0] & reached[2] and not reached[1] & reached[2]
    # Keys with the same salt share, and a request may still choose another salt.
    assert team.salt_for("x") == mates.salt_for("x") != team.salt_for("")


def test_what_a_plain_key_stored_stays_its_own_when_another_key_is_removed(tmp_path: Path) -> None:
    """Plain keys are named by their place, so another one gets the name. A key with a name may get a new secret."""
    path = tmp_path / "keys"
    path.write_text("one\ntwo\n")
    one, two = read_key_file(path)
    path.write_text("two\n")
    [left] = read_key_file(path)
    assert left.name == one.name and left.owner == two.owner != one.owner
    assert plain_keys(["one"])[0].owner == one.owner
    named = ApiKey("team", one.key_sha256)
    assert named.owner == "team" == ApiKey("team", two.key_sha256).owner
