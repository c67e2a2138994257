"""The small checkpoint: its data, its files and its videos; what needs no PyTorch."""

import json
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest
from safetensors import safe_open

from cinetile.models.wan import WanPipeline, small_checkpoint
from training.tiny_wan import caption_check, codec, scenes

HELD_OUT = scenes.held_out_scenes()
WRONG = {
    "color": dict(zip(scenes.COLORS, [*list(scenes.COLORS)[1:], "red"], strict=True)),
    "shape": {"circle": "square", "square": "triangle", "triangle": "circle"},
    "texture": {"plain": "striped", "striped": "plain"},
    "background": {"dark": "light", "light": "tiled", "tiled": "dark"},
    "direction": {"left": "right", "right": "up", "up": "down", "down": "left"},
}


def render(chosen: list[scenes.Scene], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [scenes.render(scene, rng, scenes.HARD) for scene in chosen]


@pytest.fixture(scope="module")
def videos() -> list[np.ndarray]:
    return render(HELD_OUT)


def test_a_seed_names_a_video() -> None:
    first, again, other = (
        scenes.render(HELD_OUT[0], np.random.default_rng(seed), scenes.HARD) for seed in (3, 3, 4)
    )
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.1


def test_fewer_frames_show_the_same_motion() -> None:
    all_frames, three = (
        scenes.render(HELD_OUT[0], np.random.default_rng(3), scenes.HARD, frames)
        for frames in (9, 3)
    )
    np.testing.assert_allclose(all_frames[::4], three, atol=1e-5)


def test_training_never_shows_a_held_out_scene() -> None:
    assert len(HELD_OUT) == 48
    assert not set(HELD_OUT) & set(scenes.training_scenes())
    assert len(scenes.training_scenes()) + 48 == len(scenes.all_scenes())
    for direction in scenes.DIRECTIONS:
        assert sum(scene.direction == direction for scene in HELD_OUT) == 12


@pytest.mark.parametrize("post", [False, True])
def test_the_caption_check_agrees_with_real_videos(post: bool) -> None:
    chosen = [replace(scene, post=post) for scene in HELD_OUT]
    shares = caption_check.score(render(chosen), chosen)
    for name in caption_check.ATTRIBUTES:
        assert shares[name] >= 0.95, (name, shares)


@pytest.mark.parametrize("attribute", caption_check.ATTRIBUTES)
def test_the_caption_check_notices_a_wrong_caption(
    attribute: str, videos: list[np.ndarray]
) -> None:
    wrong = [
        replace(scene, **{attribute: WRONG[attribute][getattr(scene, attribute)]})
        for scene in HELD_OUT
    ]
    shares = caption_check.score(videos, wrong)
    assert shares[attribute] <= 0.05
    assert shares["all"] <= 0.05
    for other in set(caption_check.ATTRIBUTES) - {attribute}:
        assert shares[other] >= 0.95


def test_what_does_not_move_has_no_direction(videos: list[np.ndarray]) -> None:
    for video in videos[:6]:
        still = np.repeat(video[4:5], len(video), axis=0)
        assert caption_check.read(still).direction == caption_check.UNKNOWN
        backwards = caption_check.read(video[::-1]).direction
        assert backwards not in (caption_check.UNKNOWN, caption_check.read(video).direction)


def test_an_empty_picture_is_unknown() -> None:
    reading = caption_check.read(np.full((9, 64, 64, 3), 0.9, np.float32))
    assert reading.background == "light"
    assert {reading.color, reading.shape, reading.texture, reading.direction} == {"unknown"}


def test_the_caption_check_names_bad_input(videos: list[np.ndarray]) -> None:
    with pytest.raises(ValueError, match="video must be"):
        caption_check.read(videos[0][:, :32])
    with pytest.raises(ValueError, match=r"as many as scenes \(48\), got 1"):
        caption_check.score(videos[:1], HELD_OUT)


def test_captions_say_every_attribute_in_any_wording() -> None:
    rng = np.random.default_rng(0)
    told = 0
    for scene in HELD_OUT:
        words = scenes.caption(replace(scene, post=True), rng).split()
        assert {scene.color, scene.direction, "post"} <= set(words)
        assert scene.texture == "plain" or "striped" in words
        told += scene.background in words
        assert scene.background in scenes.caption(scene)
    assert len(HELD_OUT) / 2 < told < len(HELD_OUT)  # any background is right where none is told


class TestCodec:
    def test_it_whitens_and_comes_back(self, videos: list[np.ndarray]) -> None:
        fitted = codec.fit()
        latents = fitted.encode(np.stack(videos))
        assert latents.shape == (48, 9, 16, 16, 16)
        assert np.abs(latents.mean((0, 1, 2, 3))).max() < 0.2
        assert np.abs(latents.std((0, 1, 2, 3)) - 1).max() < 0.2
        error = np.square(fitted.decode(latents) - np.stack(videos)).mean()
        assert 10 * np.log10(1 / error) > 28

    def test_the_caption_check_agrees_after_the_round_trip(self, videos: list[np.ndarray]) -> None:
        fitted = codec.fit()
        shares = caption_check.score(fitted.decode(fitted.encode(np.stack(videos))), HELD_OUT)
        assert min(shares[name] for name in caption_check.ATTRIBUTES) >= 0.95


class TestCheckpoint:
    """The files that ship."""

    FOLDER = resources.files("cinetile") / "models" / "checkpoints" / "tiny_wan"
    WEIGHTS = "diffusion_pytorch_model.safetensors"

    def config(self, name: str) -> dict:
        return json.loads((self.FOLDER / name).read_text())

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        with resources.as_file(self.FOLDER / name) as path, safe_open(path, "numpy") as file:
            return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118

    def test_it_is_at_most_15_megabytes(self) -> None:
        with resources.as_file(self.FOLDER) as folder:
            assert sum(file.stat().st_size for file in folder.rglob("*")) <= 15e6

    def test_the_transformer_has_diffusers_names_and_shapes(self) -> None:
        config = self.config("transformer/config.json")
        dim = config["num_attention_heads"] * config["attention_head_dim"]
        shapes = self.shapes(f"transformer/{self.WEIGHTS}")
        assert shapes["patch_embedding.weight"] == (dim, 16, 1, 2, 2)
        assert shapes["condition_embedder.time_proj.weight"] == (6 * dim, dim)
        assert shapes["blocks.5.attn1.norm_q.weight"] == (dim,)
        assert shapes["blocks.0.ffn.net.0.proj.weight"] == (config["ffn_dim"], dim)
        assert shapes["proj_out.weight"] == (64, dim)
        # In a block: twice 4 projections and 2 norms; norm2, ffn and the table.
        assert len(shapes) == 15 + config["num_layers"] * 27
        assert not any(name.startswith(("place.", "text.")) for name in shapes)

    def test_the_codec_is_the_fitted_one(self) -> None:
        fitted = codec.fit()
        expected = {
            "mean": fitted.mean,
            "encoder.weight": fitted.encoder,
            "decoder.weight": fitted.decoder,
        }
        path = self.FOLDER / "vae" / self.WEIGHTS
        with resources.as_file(path) as local, safe_open(local, "numpy") as file:
            for name, value in expected.items():
                stored = file.get_tensor(name)
                assert stored.dtype == np.float32
                np.testing.assert_allclose(stored, value, atol=1e-3)

    def test_the_tokenizer_knows_every_word_of_a_caption(self) -> None:
        vocabulary = self.config("tokenizer/tokenizer.json")["model"]["vocab"]
        assert [vocabulary[word] for word in ("<pad>", "</s>", "<unk>")] == [0, 1, 2]
        rng = np.random.default_rng(0)
        for scene in scenes.all_scenes():
            caption = scenes.caption(replace(scene, post=True), rng)
            assert set(caption.split()) <= set(vocabulary)
            assert len(caption.split()) < self.config("generation.json")["max_sequence_length"]
        shapes = self.shapes("text_encoder/model.safetensors")
        assert shapes["shared.weight"] == (len(vocabulary), 64)


def test_generated_videos_show_what_their_captions_say() -> None:
    """One held-out caption for each direction, by the code and the weights that ship."""
    chosen = HELD_OUT[::12]
    pipe = WanPipeline.from_pretrained(small_checkpoint())
    output = pipe([scenes.caption(scene) for scene in chosen], seed=0, num_inference_steps=10)
    shares = caption_check.score(np.asarray(output.frames), chosen)
    for name in ("color", "texture", "background", "direction"):
        assert shares[name] >= 0.75, shares
