"""Files of packed weights: a file that differs from what was written is never used, and is made again."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from weft.loading.packed import identity_of, open_packed, packed_files, packed_path

_kernels = pytest.importorskip("weft._kernels")

SIZES = {"first": 5000, "second": 100, "third": 9000}
OTHER_USER = 12345


class Packed:
    """The packed weights of one small model, in its own WEFT_HOME."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.path = packed_path(model, "stored-7")
        self.num_filled = 0

    def open(self, sizes: dict[str, int] = SIZES) -> dict[str, np.ndarray] | None:
        identity = identity_of([self.model], "stored-7")
        return open_packed(self.path, identity, sizes, self._fill, _kernels.checksum, 2)

    def _fill(self, name: str, out: np.ndarray) -> None:
        self.num_filled += 1
        out[:] = content(name)

    def opened_right(self) -> bool:
        """True if it opens and every piece has the right content."""
        pieces = self.open()
        return pieces is not None and all(
            bytes(piece) == bytes(content(name)) for name, piece in pieces.items()
        )

    def flip(self, position: int, bit: int = 0) -> None:
        raw = bytearray(self.path.read_bytes())
        raw[position] ^= 1 << bit
        self.path.write_bytes(raw)

    @property
    def others(self) -> list[str]:
        """Other files in the folder, except for the lock."""
        return sorted(p.name for p in self.path.parent.iterdir() if p not in (self.path, self.lock))

    @property
    def lock(self) -> Path:
        return self.path.parent / ".lock"


def content(name: str) -> np.ndarray:
    return np.random.default_rng(len(name)).integers(0, 256, SIZES[name], dtype=np.uint8)


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packed:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    model = tmp_path / "model.gguf"
    model.write_bytes(b"weights")
    made = Packed(model)
    assert made.opened_right() and made.num_filled == 3
    return made


def assert_made_again(packed: Packed, caplog: pytest.LogCaptureFixture, why: str) -> None:
    """The damaged file is set aside with one warning and made again; the next start warns of nothing."""
    caplog.clear()
    packed.num_filled = 0
    assert packed.opened_right() and packed.num_filled == 3
    (warning,) = caplog.messages
    assert str(packed.path) in warning and why in warning and ".damaged" in warning
    assert packed.path.with_suffix(".damaged").exists()
    caplog.clear()
    assert packed.opened_right() and packed.num_filled == 3 and not caplog.messages


def test_a_second_start_maps_what_the_first_one_wrote(
    packed: Packed, caplog: pytest.LogCaptureFixture
) -> None:
    assert packed.opened_right() and packed.num_filled == 3
    assert not caplog.messages and packed.others == []


SECTIONS: dict[str, Callable[[bytes], int]] = {
    "magic": lambda raw: 3,
    "checksum of the header": lambda raw: 20,
    "length of the header": lambda raw: 28,
    "upper bytes of that length": lambda raw: 35,
    "name of a source": lambda raw: raw.index(b"model.gguf"),
    "size of a piece": lambda raw: raw.index(b"5000"),
    "zeros behind the header": lambda raw: 4095,
    "first piece": lambda raw: 4096,
    "last byte of a piece": lambda raw: 4096 + 4999,
    "zeros between pieces": lambda raw: 4096 + 5001,
    "last piece": lambda raw: len(raw) - 8 - 8000,
    "checksums": lambda raw: len(raw) - 1,
}


@pytest.mark.parametrize("section", SECTIONS)
def test_a_flipped_bit_in_any_section_is_found_and_the_file_made_again(
    packed: Packed, caplog: pytest.LogCaptureFixture, section: str
) -> None:
    packed.flip(SECTIONS[section](packed.path.read_bytes()), bit=5)
    assert_made_again(packed, caplog, "checksums" if "piece" in section and "size" not in section else "")


def test_a_flipped_bit_anywhere_is_never_loaded(packed: Packed, caplog: pytest.LogCaptureFixture) -> None:
    for position in range(0, packed.path.stat().st_size, 67):
        packed.flip(position, bit=position % 8)
        packed.num_filled = 0
        assert packed.opened_right() and packed.num_filled == 3, position


@pytest.mark.parametrize("size", [0, 1, 19, 36, 100, 4096, 12000, -1, +1])
def test_a_file_of_another_length_is_made_again(
    packed: Packed, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    whole = packed.path.stat().st_size
    os.truncate(packed.path, size if size > 1 or size == 0 else whole + size)
    assert_made_again(packed, caplog, "")


def test_overwritten_pages_are_found(packed: Packed, caplog: pytest.LogCaptureFixture) -> None:
    raw = bytearray(packed.path.read_bytes())
    raw[8192:12288] = bytes(4096)
    packed.path.write_bytes(raw)
    assert_made_again(packed, caplog, "checksums")


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o602])
def test_a_file_that_others_may_write_to_is_not_used(
    packed: Packed, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    packed.path.chmod(mode)
    assert_made_again(packed, caplog, f"mode {mode:o}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_not_used(packed: Packed, caplog: pytest.LogCaptureFixture) -> None:
    os.chown(packed.path, OTHER_USER, OTHER_USER)
    assert_made_again(packed, caplog, f"user {OTHER_USER}")


def test_a_folder_in_place_of_the_file_is_set_aside(packed: Packed, caplog: pytest.LogCaptureFixture) -> None:
    packed.path.unlink()
    packed.path.mkdir()
    assert_made_again(packed, caplog, "cannot be read")


def test_a_folder_that_others_may_write_to_is_closed_to_them(
    packed: Packed, caplog: pytest.LogCaptureFixture
) -> None:
    packed.path.parent.chmod(0o777)
    assert packed.opened_right() and packed.num_filled == 3 and not caplog.messages
    assert packed.path.parent.stat().st_mode & 0o777 == 0o755


def test_a_damaged_file_is_set_aside_after_a_folder_and_a_folder_after_a_file(
    packed: Packed, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        packed.path.unlink()
        packed.path.mkdir()
        (packed.path / "content").touch()
        assert_made_again(packed, caplog, "cannot be read")
        packed.flip(5000)
        assert_made_again(packed, caplog, "checksums")


def test_a_damaged_folder_of_another_model_is_deleted(packed: Packed) -> None:
    other = packed.path.with_name("other-0123456789ab-stored-7.damaged")
    (other / "content").mkdir(parents=True)
    packed.flip(5000)
    assert packed.opened_right() and not other.exists()


def test_a_damaged_file_that_cannot_be_renamed_gives_a_warning_that_says_so(
    packed: Packed, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, target: Path) -> None:
        raise OSError(errno.EACCES, "not allowed")

    packed.flip(5000)
    monkeypatch.setattr(Path, "replace", refuse)
    assert packed.open() is None, "the caller packs in memory"
    (warning,) = caplog.messages
    assert "checksums" in warning and "cannot be renamed" in warning and "it is renamed" not in warning


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_nothing_is_kept_in_a_folder_of_another_user(
    packed: Packed, caplog: pytest.LogCaptureFixture
) -> None:
    before = packed.path.stat()
    os.chown(packed.path.parent, OTHER_USER, OTHER_USER)
    assert packed.open() is None
    (warning,) = caplog.messages
    assert str(packed.path.parent) in warning and f"user {OTHER_USER}" in warning
    assert packed.path.stat() == before


def test_a_file_made_under_any_umask_is_used_by_the_next_start(
    packed: Packed, caplog: pytest.LogCaptureFixture
) -> None:
    packed.path.unlink()
    before = os.umask(0)
    try:
        assert packed.opened_right() and packed.num_filled == 6
    finally:
        os.umask(before)
    assert packed.opened_right() and packed.num_filled == 6 and not caplog.messages


def test_weights_of_changed_files_are_packed_anew_without_a_warning(
    packed: Packed, caplog: pytest.LogCaptureFixture
) -> None:
    packed.model.write_bytes(b"other weights")
    assert packed.opened_right() and packed.num_filled == 6
    assert not caplog.messages and packed.others == []


def test_processes_that_find_the_same_damage_make_one_new_file(
    packed: Packed, caplog: pytest.LogCaptureFixture
) -> None:
    packed.flip(5000)
    right: list[bool] = []
    threads = [threading.Thread(target=lambda: right.append(packed.opened_right())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 6 and packed.num_filled == 6
    assert len(caplog.messages) == 1


def test_a_start_does_not_wait_forever_for_another_process_that_packs(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.loading.packed._LOCK_SECONDS", 0.2)
    packed.path.unlink()
    with packed.lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert packed.open() is None, "the caller packs in memory"
    assert packed.opened_right(), "the lock is free again"


def test_packing_deletes_files_that_no_start_will_use_again(packed: Packed) -> None:
    folder = packed.path.parent
    gone = Packed(packed.model.with_name("gone.gguf"))
    gone.model.write_bytes(b"gone")
    assert gone.opened_right()
    gone.model.unlink()
    other = Packed(packed.model.with_name("other.gguf"))
    other.model.write_bytes(b"other")
    assert other.opened_right()
    stays = {"notes.txt", "model-0123456789ab-stored-8.packed", other.path.name}
    for name in (
        "model-0123456789ab-stored-6.packed",
        "model-0123456789ab-int8-4.packed",
        "model-0123456789ab-int8-4.lock",
        ".partial-model-0123456789ab-stored-6.packed",
        ".partial-model-0123456789ab-stored-7.packed",
        "model-0123456789ab-stored-7.damaged",
        "nonsense-0123456789ab-stored-7.packed",
        *(stays - {other.path.name}),
    ):
        (folder / name).write_bytes(b"x")
    packed.path.unlink()
    assert packed.opened_right()
    assert packed.others == sorted(stays)
    assert other.opened_right() and other.num_filled == 3


def test_all_packed_files_of_a_model_are_found_by_its_path(packed: Packed) -> None:
    longer = Packed(packed.model.with_name("model.gguf.gguf"))
    longer.model.write_bytes(b"longer")
    assert longer.opened_right()
    packed.flip(5000)
    assert packed.opened_right()
    assert packed_files(packed.model) == [packed.path.with_suffix(".damaged"), packed.path]


def test_a_header_that_claims_to_be_long_is_not_read_as_such(
    packed: Packed, caplog: pytest.LogCaptureFixture
) -> None:
    raw = bytearray(packed.path.read_bytes())
    raw[28:36] = (1 << 62).to_bytes(8, "little")
    packed.path.write_bytes(raw)
    assert_made_again(packed, caplog, "header")


def test_the_checksum_changes_with_every_bit_every_length_and_every_exchange() -> None:
    sound = np.random.default_rng(3).integers(0, 256, 203, dtype=np.uint8)
    seen = {_kernels.checksum(sound)}
    for bit in range(8 * len(sound)):
        damaged = sound.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        seen.add(_kernels.checksum(damaged))
    assert len(seen) == 8 * len(sound) + 1
    assert len({_kernels.checksum(np.zeros(length, np.uint8)) for length in range(200)}) == 200
    words = sound[:192].reshape(-1, 8)
    exchanged = {_kernels.checksum(np.roll(words, shift, axis=0).reshape(-1)) for shift in range(len(words))}
    assert len(exchanged) == len(words)
    twice = sound.copy()
    twice[[7, 39]] ^= 0x80  # the highest bits of two words of one chain
    assert _kernels.checksum(twice) != _kernels.checksum(sound)
