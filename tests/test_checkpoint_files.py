"""Training state on disk: round trips, and errors for damaged files."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline import state as state_room
from paceline.errors import CheckpointError, StateError
from paceline.state import (
    FORMAT,
    Section,
    TrainState,
    checksum,
    list_checkpoints,
    load_checkpoint,
    load_into_model,
    save_checkpoint,
    state_from_model,
)

DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)

names = st.from_regex(r"[a-z0-9_.]{1,8}", fullmatch=True)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any type and shape, 0-d and empty ones included, with any bits; also views and strides."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    base = torch.randint(-100, 100, (2, *shape), generator=generator)
    made = (base % 2 == 0) if dtype is torch.bool else base.abs().to(dtype)
    if dtype.is_floating_point:
        made = made / 7
    made = made[draw(st.integers(0, 1))]
    if draw(st.booleans()):
        made = made.mT if made.dim() > 1 else made[1:] if made.dim() == 1 else made
    return made


@st.composite
def sections(draw: st.DrawFn) -> Section:
    return Section(
        draw(st.dictionaries(names, tensors(), max_size=5)),
        draw(st.dictionaries(st.text(), plain, max_size=3)),
    )


@st.composite
def states(draw: st.DrawFn) -> TrainState:
    section = draw(sections())
    kinds = draw(st.lists(st.sampled_from(["weights", "buffers", "slots"]), min_size=5, max_size=5))
    named = zip(kinds, section.tensors.items(), strict=False)
    shared = Section({f"{kind}/{name}": t for kind, (name, t) in named}, section.plain)
    return TrainState(shared, draw(st.lists(sections(), max_size=3)))


def assert_same(one: Section, two: Section) -> None:
    assert one.plain == two.plain
    assert set(one.tensors) == set(two.tensors)
    for name, tensor in one.tensors.items():
        other = two.tensors[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
        assert torch.equal(tensor, other)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of a small model after a step of training."""
    return save_checkpoint(tmp_path / "checkpoints", "000000000100", make_state())


def make_model(width: int = 5) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(width)
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def make_state(width: int = 5) -> TrainState:
    shared = state_from_model(*make_model(width))
    shared.plain["coordinator"] = {"history": {"epoch": 1}, "elapsed_s": 2.5}
    workers = [Section({"rng/torch": torch.get_rng_state()}, {"step": k}) for k in range(2)]
    return TrainState(shared, workers)


# ---- round trips -----------------------------------------------------------------------------


@given(section=sections())
def test_section_round_trip(section: Section) -> None:
    assert_same(section, Section.from_bytes(section.to_bytes()))


@settings(max_examples=50)
@given(state=states())
@example(state=TrainState(Section()))
def test_checkpoint_round_trip(state: TrainState, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("checkpoints")
    path = save_checkpoint(folder, "000000000001", state)
    again = load_checkpoint(path)
    assert_same(state.shared, again.shared)
    assert len(state.workers) == len(again.workers)
    for mine, other in zip(state.workers, again.workers, strict=True):
        assert_same(mine, other)
    assert again.fingerprint() == state.fingerprint()
    shutil.rmtree(folder)


@given(section=sections())
def test_checksum_depends_on_every_bit_and_not_on_layout(section: Section) -> None:
    before = checksum(section)
    copies = {name: tensor.contiguous().clone() for name, tensor in section.tensors.items()}
    assert checksum(Section(copies)) == before
    for name, tensor in copies.items():
        if tensor.numel():
            flat = tensor.reshape(-1).view(torch.uint8)
            flat[-1] ^= 1
            assert checksum(Section({**copies, name: tensor})) != before
            flat[-1] ^= 1


def test_restored_model_goes_on_the_same(tmp_path: Path) -> None:
    model, optimizer = make_model()
    path = save_checkpoint(tmp_path, "1", TrainState(state_from_model(model, optimizer)))
    other, other_optimizer = make_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    load_into_model(load_checkpoint(path).shared, other, other_optimizer)
    inputs = torch.randn(4, 3)
    for one, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        its_optimizer.zero_grad()
        one(inputs).square().mean().backward()
        its_optimizer.step()
    for mine, theirs in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


# ---- refusals --------------------------------------------------------------------------------


def refuse(path: Path, words: str) -> None:
    """One line that names the checkpoint and what is wrong with it."""
    with pytest.raises(CheckpointError, match=words) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["state.json", "state.safetensors", "worker-1.safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_file_cut_off_is_refused(saved: Path, name: str, share: float) -> None:
    path = saved / name
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    refuse(saved, "cannot read")


@pytest.mark.parametrize("name", ["state.json", "state.safetensors", "worker-0.safetensors"])
def test_file_missing_is_refused(saved: Path, name: str) -> None:
    (saved / name).unlink()
    refuse(saved, name)


@pytest.mark.parametrize("name", ["state.json", "state.safetensors", "worker-0.safetensors"])
@pytest.mark.parametrize(
    "content", [b"\0" * 64, b"\xff" * 64, b"[]", b"null", b"\x02" + b"\0" * 7 + b"{}"]
)
def test_file_of_something_else_is_refused(saved: Path, name: str, content: bytes) -> None:
    (saved / name).write_bytes(content)
    refuse(saved, "cannot read|damaged")


def change_head(path: Path, **changes: Any) -> None:
    head = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**head, **changes}))


def test_another_format_is_refused(saved: Path) -> None:
    change_head(saved, format=FORMAT + 1)
    refuse(saved, f"has format {FORMAT + 1}; this version reads format {FORMAT}")


def test_exchanged_tensors_are_refused(saved: Path) -> None:
    """The files of two checkpoints mixed up."""
    other = save_checkpoint(saved.parent, "000000000200", make_state(width=7))
    shutil.copy(other / "state.safetensors", saved / "state.safetensors")
    refuse(saved, "damaged")


def test_another_model_is_refused(saved: Path) -> None:
    state = load_checkpoint(saved)
    with pytest.raises(StateError, match=r"another model: \S+ has shape \(5, 3\)"):
        load_into_model(state.shared, *make_model(width=7))
    deeper = torch.nn.Sequential(*make_model()[0], torch.nn.Linear(5, 2))
    with pytest.raises(StateError, match=r"weights/2\.\w+ \(missing in the state\)"):
        load_into_model(state.shared, deeper, torch.optim.Adam(deeper.parameters()))
    assert state.fingerprint() == make_state().fingerprint()
    assert state.fingerprint() != make_state(width=7).fingerprint()


# ---- writing ---------------------------------------------------------------------------------


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for samples in (5, 100, 20, 1000):
        save_checkpoint(tmp_path, f"{samples:012d}", make_state())
    kept = list_checkpoints(tmp_path)
    assert [int(path.name) for path in kept] == [100, 1000]
    assert sorted(p.name for p in tmp_path.iterdir()) == [p.name for p in kept]


def test_writing_again_replaces(saved: Path) -> None:
    state = make_state()
    state.shared.plain["more"] = True
    save_checkpoint(saved.parent, saved.name, state)
    assert load_checkpoint(saved).shared.plain["more"] is True


def test_unfinished_ones_do_not_count(saved: Path) -> None:
    (saved.parent / ".000000000900.partial").mkdir()
    (saved.parent / "000000000900").mkdir()
    (saved.parent / "notes").mkdir()
    assert list_checkpoints(saved.parent) == [saved]
    assert list_checkpoints(saved.parent / "nowhere") == []


@pytest.mark.parametrize("at", ["write_tensors", "write_bytes", "write_text", "replace"])
@pytest.mark.parametrize("name", ["000000000100", "000000000200"])
def test_write_that_fails_leaves_the_old_one(
    saved: Path, monkeypatch: pytest.MonkeyPatch, at: str, name: str
) -> None:
    """Wherever it fails, also when it was to replace a checkpoint of the same name."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    where = {"write_tensors": state_room, "replace": os}.get(at, Path)
    with monkeypatch.context() as patch:
        patch.setattr(where, at, fail)
        with pytest.raises(
            StateError, match=re.escape(f"cannot write checkpoint {saved.parent / name}")
        ):
            save_checkpoint(saved.parent, name, make_state())
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
    assert_same(load_checkpoint(saved).shared, make_state().shared)


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StateError, match="cannot write checkpoint"):
        save_checkpoint(tmp_path / "file", "1", make_state())
