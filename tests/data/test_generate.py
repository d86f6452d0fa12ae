"""The generated set: deterministic, told apart by a small network, and what inspection says of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from stagewright.data.generate import _MAX_CLASSES, _class_look, _draw_image, make_images
from stagewright.data.inspection import Spread, inspect_dataset, save_contact_sheet
from stagewright.data.opening import open_dataset
from stagewright.errors import DataError, UsageError
from stagewright.runtime.settings import Settings
from stagewright.scheduling.drawing import sketch_plan
from stagewright.training.feeds import DataFeed


@pytest.mark.parametrize("format", ["folder", "ofrecord", "tar"])
def test_the_set_is_written_in_every_format(tmp_path: Path, format: str) -> None:
    assert make_images(tmp_path / "set", 5, 23, 16, format, seed=1, images_per_file=10) == 23
    found = inspect_dataset(open_dataset(tmp_path / "set"))
    assert (found.num_images, found.num_classes, found.class_counts) == (23, 5, (5, 5, 5, 4, 4))
    assert found.class_names[0] == "000-plain-red-disc"
    assert found.heights == found.widths == Spread(16, 16, 16)
    assert found.image_bytes.smallest <= found.image_bytes.median <= found.image_bytes.largest
    assert found.faults == ()


def test_classes_all_look_different() -> None:
    assert len({_class_look(label) for label in range(_MAX_CLASSES)}) == _MAX_CLASSES


def test_the_same_seed_draws_the_same_image() -> None:
    assert (_draw_image(3, 8, 24, seed=1) == _draw_image(3, 8, 24, seed=1)).all()
    assert (_draw_image(3, 8, 24, seed=1) != _draw_image(3, 8, 24, seed=2)).any()
    assert (_draw_image(3, 8, 24, seed=1) != _draw_image(3, 9, 24, seed=1)).any()


@pytest.mark.parametrize("options", [{"num_classes": 0}, {"num_classes": 1000}, {"num_images": 0}, {"size": 4}])
def test_sets_that_cannot_be_drawn_are_refused(tmp_path: Path, options: dict) -> None:
    with pytest.raises(UsageError, match="cannot be"):
        make_images(tmp_path / "set", **options)


def test_inspection_counts_what_cannot_be_read(tmp_path: Path, encode: Callable[..., bytes]) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "good.jpg").write_bytes(encode(30, 40))
    (tmp_path / "cat" / "text.jpg").write_bytes(b"hello")
    found = inspect_dataset(open_dataset(tmp_path))
    assert (found.num_images, len(found.faults)) == (1, 1)
    assert "text.jpg is not an image" in found.faults[0]
    (tmp_path / "cat" / "good.jpg").unlink()
    with pytest.raises(DataError, match="none of 1 images can be read"):
        inspect_dataset(open_dataset(tmp_path))


def test_a_contact_sheet_shows_images_from_the_whole_set(tmp_path: Path) -> None:
    make_images(tmp_path / "set", 4, 40, 32, "ofrecord")
    shown = save_contact_sheet(
        open_dataset(tmp_path / "set"), tmp_path / "sheet.png", num_columns=5, num_rows=3, side=64
    )
    sheet = Image.open(tmp_path / "sheet.png")
    assert (shown, sheet.size) == (15, (5 * 64, 3 * (64 + 14)))
    colours = {sheet.resize((1, 1), box=(64 * n, 14, 64 * n + 64, 78)).getpixel((0, 0)) for n in range(5)}
    assert len(colours) > 3


class Residual(nn.Module):
    """Two convolutions and a way around them, at half the resolution."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width_in, width, 3, stride=2, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(x + self.norms[1](self.second(x)))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_small_residual_network_learns_the_set(tmp_path: Path) -> None:
    torch.manual_seed(0)
    make_images(tmp_path / "train", 10, 1000, 40, "ofrecord", seed=0)
    make_images(tmp_path / "test", 10, 300, 40, "tar", seed=1)
    network = nn.Sequential(Residual(3, 12), Residual(12, 24), Residual(24, 48), nn.Flatten(), nn.LazyLinear(10))
    train = DataFeed(open_dataset(tmp_path / "train"), size=32, crop_area=0.5)
    train.settle(sketch_plan((1,), batch=50), Settings())
    rows = lambda feed, batch, size: (feed.finish(*feed.inputs(batch, 0, size)), *feed.targets(batch, 0, size))  # noqa: E731
    network(rows(train, 0, 50)[0])
    optimizer = torch.optim.Adam(network.parameters(), 2e-3)
    for batch in range(100):
        images, labels = rows(train, batch, 50)
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()
    network.eval()
    test = DataFeed(open_dataset(tmp_path / "test"), size=32, is_training=False)
    test.settle(sketch_plan((1,), batch=300), Settings())
    images, labels = rows(test, 0, 300)
    right = (network(images).argmax(dim=1) == labels).float().mean()
    assert right > 0.9
