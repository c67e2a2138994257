"""Token grids and token orders."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import strategies
from hypothesis import given

import cinetile as ct

WAN_SHAPES = [
    pytest.param((81, 480, 832), (21, 30, 52), 1560, 32_760, id="480p"),
    pytest.param((81, 720, 1280), (21, 45, 80), 3600, 75_600, id="720p"),
    pytest.param((81, 1072, 1920), (21, 67, 120), 8040, 168_840, id="1080p"),
    pytest.param((81, 1440, 2560), (21, 90, 160), 14_400, 302_400, id="1440p"),
]


@pytest.mark.parametrize(("video", "sizes", "per_frame", "total"), WAN_SHAPES)
def test_wan_shapes(video: Any, sizes: Any, per_frame: int, total: int) -> None:
    grid = ct.TokenGrid.from_video(*video)
    assert grid == ct.TokenGrid(*sizes)
    assert (grid.tokens_per_frame, grid.num_video_tokens, grid.num_tokens) == (
        per_frame,
        total,
        total,
    )


@pytest.mark.parametrize(
    ("video", "sizes"),
    [
        pytest.param((1, 16, 16), (1, 1, 1), id="one token"),
        pytest.param((1, 720, 1280), (1, 45, 80), id="one frame"),
        pytest.param((4, 16, 16), (1, 1, 1), id="an unfinished group of frames"),
        pytest.param((5, 16, 16), (2, 1, 1), id="a finished group of frames"),
        pytest.param((80, 480, 832), (20, 30, 52), id="a frame less"),
        pytest.param((82, 480, 832), (21, 30, 52), id="a frame more"),
        pytest.param((81, 1080, 1920), (21, 67, 120), id="height no multiple of 16"),
        pytest.param((81, 495, 847), (21, 30, 52), id="both floored"),
    ],
)
def test_from_video_rounds_down(video: Any, sizes: Any) -> None:
    assert ct.TokenGrid.from_video(*video) == ct.TokenGrid(*sizes)


def test_from_video_of_another_model() -> None:
    grid = ct.TokenGrid.from_video(
        65, 512, 768, vae=(8, 32, 32), patch=(2, 1, 1), text_tokens=7, text_first=True
    )
    assert grid == ct.TokenGrid(4, 16, 24, text_tokens=7, text_first=True)


@pytest.mark.parametrize(
    ("video", "options", "message"),
    [
        ((0, 16, 16), {}, "num_frames must be at least 1"),
        ((1, 15, 16), {}, "height must be at least 16"),
        ((1, 16, 15), {}, "width must be at least 16"),
        ((4, 16, 16), {"patch": (2, 2, 2)}, "num_frames must be at least 5"),
        ((1, 16, 16), {"text_tokens": -1}, "text_tokens must be at least 0"),
    ],
)
def test_from_video_refuses_less_than_a_patch(video: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ct.TokenGrid.from_video(*video, **options)


def test_text_counts_among_the_tokens() -> None:
    grid = ct.TokenGrid(3, 2, 5, text_tokens=4, text_first=True)
    assert (grid.tokens_per_frame, grid.num_video_tokens, grid.num_tokens) == (10, 30, 34)
    assert str(grid) == "3x2x5 + 4 text = 34 tokens"


def test_str_without_text() -> None:
    assert str(ct.TokenGrid(21, 45, 80)) == "21x45x80 = 75,600 tokens"


@pytest.mark.parametrize("name", ["frames", "height", "width", "text_tokens"])
class TestBadSizes:
    def sizes(self, name: str, value: object) -> dict[str, Any]:
        return {"frames": 2, "height": 3, "width": 4, "text_tokens": 5, name: value}

    def test_too_small(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"{name} must be at least"):
            ct.TokenGrid(**self.sizes(name, -1))

    @pytest.mark.parametrize("value", [1.5, "3", None, True])
    @pytest.mark.usefixtures("unchecked")
    def test_no_integer(self, name: str, value: object) -> None:
        with pytest.raises(TypeError, match=f"{name} must be an integer"):
            ct.TokenGrid(**self.sizes(name, value))

    @pytest.mark.usefixtures("unchecked")
    def test_numpy_integers_become_ints(self, name: str) -> None:
        grid = ct.TokenGrid(**self.sizes(name, np.int64(3)))
        assert type(getattr(grid, name)) is int
        assert grid == ct.TokenGrid(**self.sizes(name, 3))


@pytest.mark.parametrize("name", ["frames", "height", "width"])
def test_no_size_may_be_zero(name: str) -> None:
    sizes: dict[str, Any] = {"frames": 1, "height": 1, "width": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        ct.TokenGrid(**sizes)


def test_grids_are_frozen_and_hash_by_value() -> None:
    grid = ct.TokenGrid(2, 3, 4)
    assert hash(grid) == hash(ct.TokenGrid(2, 3, 4))
    with pytest.raises(dataclasses.FrozenInstanceError):
        grid.frames = 3  # pyright: ignore[reportAttributeAccessIssue]


def indices_by_definition(grid: ct.TokenGrid, order: ct.TokenOrder) -> list[int]:
    """The order written token by token."""
    size = grid.height * grid.width
    text_start = 0 if grid.text_first else grid.frames * size
    video_start = grid.text_tokens if grid.text_first else 0
    text = [text_start + i for i in range(grid.text_tokens)]
    num_valid = grid.text_tokens - order.padded_text
    leading = [(f, p) for f in range(order.leading_frames) for p in range(size)]
    others = [(f, p) for f in range(order.leading_frames, grid.frames) for p in range(size)]
    if order.layout == "token_major":
        others.sort(key=lambda token: (token[1], token[0]))
    video = [video_start + f * size + p for f, p in leading + others]
    front, back = (text[:num_valid], []) if order.text_first else ([], text[:num_valid])
    return front + video + back + text[num_valid:]


@given(strategies.grids_with_orders())
def test_indices(case: tuple[ct.TokenGrid, ct.TokenOrder]) -> None:
    grid, order = case
    expected = indices_by_definition(grid, order)
    indices = order.indices(grid)
    assert indices.dtype == np.int32
    assert indices.tolist() == expected
    assert order.is_frame_major(grid) == (expected == list(range(grid.num_tokens)))


def test_token_major_of_a_small_grid() -> None:
    grid = ct.TokenGrid(3, 1, 2)
    assert ct.TokenOrder("token_major").indices(grid).tolist() == [0, 2, 4, 1, 3, 5]
    leading = ct.TokenOrder("token_major", leading_frames=1)
    assert leading.indices(grid).tolist() == [0, 1, 2, 4, 3, 5]


@pytest.mark.usefixtures("unchecked")
class TestBadOrders:
    def test_unknown_layout(self) -> None:
        layout: Any = "column_major"
        with pytest.raises(ValueError, match="layout must be one of 'frame_major', 'token_major'"):
            ct.TokenOrder(layout)

    @pytest.mark.parametrize("name", ["leading_frames", "padded_text"])
    def test_negative(self, name: str) -> None:
        options: Any = {name: -1}
        with pytest.raises(ValueError, match=f"{name} must be at least 0, got -1"):
            ct.TokenOrder(**options)

    @pytest.mark.parametrize("name", ["leading_frames", "padded_text"])
    def test_no_integer(self, name: str) -> None:
        options: Any = {name: 0.5}
        with pytest.raises(TypeError, match=f"{name} must be an integer"):
            ct.TokenOrder(**options)
