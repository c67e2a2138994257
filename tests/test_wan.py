"""The Wan models and the pipeline: what parity with diffusers does not show."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from wan_models import GOLDEN, change_json, random_model, small_pipeline
from wan_suite import two_experts

import cinetile as ct
from cinetile.models.wan import (
    AutoencoderKLWan,
    AutoencoderKLWanConfig,
    DenseAttention,
    FlowMatchEulerDiscreteScheduler,
    GenerationDefaults,
    Tiling,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
    WanTransformerConfig,
)
from cinetile.models.wan.cost import CallCost, call_cost, duration
from cinetile.models.wan.layers import pack_layers, random_weight


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> WanPipeline:
    return WanPipeline.from_pretrained(small_pipeline(tmp_path_factory.mktemp("wan") / "model"))


@pytest.fixture(scope="module")
def vae() -> AutoencoderKLWan:
    # One level, and no attention in the middle: what a pixel depends on is near it.
    config = AutoencoderKLWanConfig(
        base_dim=2,
        z_dim=2,
        dim_mult=(1,),
        num_res_blocks=1,
        temperal_downsample=(),
        latents_mean=(0.5, -1.0),
        latents_std=(2.0, 0.5),
        scale_factor_temporal=1,
        scale_factor_spatial=1,
    )
    vae = random_model(lambda: AutoencoderKLWan(config, key=jax.random.key(0)))
    return eqx.tree_at(
        lambda first: [half.mid_block.attentions[0].proj.weight for half in halves(first)],
        vae,
        replace_fn=jnp.zeros_like,
    )


def halves(vae: AutoencoderKLWan) -> tuple[Any, Any]:
    return vae.encoder, vae.decoder


@dataclass(frozen=True, eq=False)
class Watching:
    """Dense attention that records where it was called, and counts how often it was traced."""

    traced: list[Any] = field(default_factory=list)

    def __call__(self, query, key, value, *, step, layer, rng, return_record=False):
        self.traced.append((step, layer, rng))
        output = jax.nn.dot_product_attention(query, key, value)
        record = {"step": step, "layer": layer, "query": jnp.mean(query)}
        return (output, record) if return_record else output


def random_transformer(
    config: WanTransformerConfig, dtype: str = "float32"
) -> WanTransformer3DModel:
    return random_model(lambda: WanTransformer3DModel(config, key=jax.random.key(0), dtype=dtype))


class TestTransformer:
    config = WanTransformerConfig(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=6,
        freq_dim=8,
        ffn_dim=20,
        num_layers=3,
    )

    def model(self, dtype: str = "float32") -> WanTransformer3DModel:
        return random_transformer(self.config, dtype)

    def inputs(self, batch: int = 1) -> tuple[jax.Array, jax.Array, jax.Array]:
        latents, text = (jax.random.key(seed) for seed in (1, 2))
        return (
            jax.random.normal(latents, (batch, 4, 2, 4, 6)),
            jnp.full((batch,), 700.0),
            jax.random.normal(text, (batch, 5, 6)),
        )

    def test_attention_is_an_argument(self):
        model, attend = self.model(), Watching()
        run = eqx.filter_jit(model)
        dense = run(*self.inputs())
        for step in (3, 8):
            output, record = run(
                *self.inputs(), attention=attend, step=jnp.int32(step), return_record=True
            )
            np.testing.assert_allclose(output, dense, atol=1e-5)
            assert record["layer"].tolist() == [0, 1, 2]
            assert record["step"].tolist() == [step] * 3
            assert len(set(record["query"].tolist())) == 3
        # The scan is traced for all layers at once, and not again for another step.
        assert len(attend.traced) == 1

    def test_only_self_attention_is_replaced(self):
        def nothing(query, key, value, **_: object):
            del key, value
            return jnp.zeros_like(query)

        latents, timestep, text = self.inputs()
        run = eqx.filter_jit(self.model())
        first, other = (run(latents, timestep, t, attention=nothing) for t in (text, text + 1))
        assert float(jnp.abs(first - other).max()) > 1e-3

    def test_bfloat16(self):
        exact = eqx.filter_jit(self.model())(*self.inputs())
        narrow = self.model("bfloat16")
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(narrow)} == {"float32", "bfloat16"}
        output = eqx.filter_jit(narrow)(*self.inputs())
        assert output.dtype == jnp.bfloat16
        difference = jnp.abs(output.astype(jnp.float32) - exact)
        assert 1e-4 < float(difference.max()) < 0.05 * float(jnp.abs(exact).max())
        packed = eqx.tree_at(lambda first: first.blocks, narrow, pack_layers(narrow.blocks))
        again = eqx.filter_jit(packed)(*self.inputs())
        np.testing.assert_array_equal(output.astype(jnp.float32), again.astype(jnp.float32))

    @pytest.mark.parametrize(
        ("shape", "message"),
        [
            ((1, 3, 2, 4, 6), r"must be \[batch, 4, frames, height, width\]"),
            ((1, 4, 2, 5, 6), "height must be a multiple of 2"),
            ((1, 4, 1025, 4, 6), "frames must be a multiple of 1 from 1 to 1024"),
        ],
    )
    def test_shapes(self, shape: tuple[int, ...], message: str):
        model = self.model()
        with pytest.raises(ValueError, match=message):
            model(jnp.zeros(shape), jnp.zeros(1), jnp.zeros((1, 5, 6)))

    def test_rope_theta(self):
        """The small checkpoint's grid is small, and so may be its slowest rotation."""
        config = replace(self.config, rope_theta=100.0)
        model, other = (
            eqx.filter_jit(random_transformer(first)) for first in (self.config, config)
        )
        difference = model(*self.inputs()) - other(*self.inputs())
        assert float(jnp.abs(difference).max()) > 1e-3


class TestAutoencoder:
    def test_tiles_give_what_the_whole_gives(self, vae: AutoencoderKLWan):
        """Away from the edges of tiles, and in every frame: the state is the tile's own."""
        latents = np.random.default_rng(0).normal(size=(1, 2, 3, 40, 4)).astype(np.float32)
        whole = vae.decode(latents)
        tiled = vae.decode(latents, tiling=Tiling(32, 4, 20, 4))
        # Nine convolutions of three rows reach nine rows far; blending starts at row 20.
        np.testing.assert_allclose(tiled[..., :20, :], whole[..., :20, :], atol=1e-5)
        np.testing.assert_allclose(tiled[..., 32:, :], whole[..., 32:, :], atol=1e-5)
        assert np.abs(tiled - whole).max() > 1e-4

    def test_frames_see_no_later_ones(self, vae: AutoencoderKLWan):
        latents = np.random.default_rng(0).normal(size=(1, 2, 4, 6, 4)).astype(np.float32)
        changed = latents.copy()
        changed[:, :, 2] += 1
        first, other = vae.decode(latents), vae.decode(changed)
        np.testing.assert_array_equal(first[:, :, :2], other[:, :, :2])
        assert np.abs(first[:, :, 2:] - other[:, :, 2:]).max((0, 1, 3, 4)).min() > 1e-4

    def test_normalization(self, vae: AutoencoderKLWan):
        latents = np.full((1, 2, 1, 2, 2), 3.0, np.float32)
        normal = vae.normalize(latents)
        assert np.asarray(normal)[0, :, 0, 0, 0].tolist() == [1.25, 8.0]
        np.testing.assert_allclose(vae.denormalize(normal), latents)

    def test_progress(self, vae: AutoencoderKLWan):
        calls: list[tuple[int, int]] = []
        vae.decode(
            np.zeros((1, 2, 2, 6, 4), np.float32),
            progress=lambda done, total: calls.append((done, total)),
        )
        assert calls == [(1, 2), (2, 2)]

    @pytest.mark.parametrize(
        ("shape", "message"),
        [
            ((1, 3, 4, 16, 16), r"4k \+ 1 frames, got 4"),
            ((1, 3, 5, 16, 20), "multiples of 8, got 16x20"),
            ((1, 4, 5, 16, 16), "3 channels, got 4"),
        ],
    )
    def test_encoding_sizes(self, shape: tuple[int, ...], message: str):
        vae = AutoencoderKLWan.load(GOLDEN / "wan21" / "vae")
        with pytest.raises(ValueError, match=message):
            vae.encode(np.zeros(shape, np.float32))

    def test_tiling(self):
        with pytest.raises(ValueError, match="stride_width must be at most 8, got 9"):
            Tiling(8, 8, 8, 9)


class TestSize:
    def test_rounding_warns(self):
        pipe = WanPipeline.from_pretrained(GOLDEN / "wan21")
        with pytest.warns(UserWarning, match="num_frames 12 -> 9, height 47 -> 32, width 50 -> 48"):
            size = pipe.video_size(12, 47, 50)
        assert (size.num_frames, size.height, size.width) == (9, 32, 48)
        assert size.latent == (3, 4, 6)
        assert (size.grid.frames, size.grid.height, size.grid.width) == (3, 2, 3)

    def test_exact_sizes_are_quiet(self):
        size = WanPipeline.from_pretrained(GOLDEN / "wan21").video_size()
        assert size.grid.num_tokens == 32_760

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"height": 15}, "height must be at least 16, got 15"),
            ({"num_frames": 0}, "num_frames must be at least 1"),
            ({"width": 20_000}, "width must be at most 16399"),
            (
                {"num_frames": 4000, "height": 16_000, "width": 16_000},
                r"must make at most 4,194,304 tokens, got 1,000,000,000 for 3997 frames of 16000x",
            ),
        ],
    )
    def test_bounds(self, arguments: dict[str, int], message: str):
        with pytest.raises(ValueError, match=message):
            WanPipeline.from_pretrained(GOLDEN / "wan21").video_size(**arguments)


class TestPipeline:
    def test_video(self, pipe: WanPipeline):
        output = pipe("a red ball", seed=1)
        assert output.frames.shape == (1, 3, 16, 24, 3)
        assert np.asarray(output.frames).dtype == np.float32
        assert 0 <= output.frames.min() < output.frames.max() <= 1
        assert set(output.seconds) == {"prompt", "weights", "denoising", "decoding"}
        assert len(output.step_seconds) == 3
        assert output.records == ()

    def test_seeds(self, pipe: WanPipeline):
        first, same, other = (
            pipe("a red ball", seed=seed, output_type="latent").frames for seed in (1, 1, 2)
        )
        drawn = pipe("a red ball", generator=np.random.default_rng(1), output_type="latent").frames
        np.testing.assert_array_equal(first, same)
        np.testing.assert_array_equal(first, drawn)
        assert np.abs(np.asarray(first) - np.asarray(other)).max() > 0.1

    def test_what_is_not_finite_makes_no_video(self, pipe: WanPipeline):
        latents = np.full((1, 4, 3, 4, 6), np.nan, np.float32)
        with pytest.raises(FloatingPointError, match="latents are not finite after step 0"):
            pipe("a red ball", latents=latents)

    def test_batches(self, pipe: WanPipeline):
        """A row of a batch is what the prompt alone gives."""
        latents = np.random.default_rng(0).normal(size=(4, 4, 3, 4, 6)).astype(np.float32)
        output = pipe(
            ["a red ball", "a dark ball"],
            "dark",
            latents=latents,
            num_videos_per_prompt=2,
            output_type="latent",
        )
        alone = pipe("a dark ball", "dark", latents=latents[3:], output_type="latent")
        np.testing.assert_allclose(output.frames[3:], alone.frames, atol=1e-4)

    def test_records(self, pipe: WanPipeline):
        for scale, parts in ((2.0, 2), (1.0, 1)):
            attend = Watching()
            output = pipe(
                "a red ball",
                seed=0,
                attention=attend,
                guidance_scale=scale,
                return_records=True,
                output_type="latent",
            )
            assert len(output.records) == 3
            for step, pair in enumerate(output.records):
                present = [record for record in pair if record is not None]
                assert len(present) == parts
                for record in present:
                    assert record["step"].tolist() == [step, step]
            assert len(attend.traced) == 1

    def test_callback(self, pipe: WanPipeline):
        seen = []

        def callback(given: WanPipeline, step: int, timestep: float, arrays: dict[str, Any]):
            assert given is pipe
            seen.append((step, timestep, sorted(arrays)))
            return {"latents": jnp.zeros_like(arrays["latents"])} if step == 2 else None

        output = pipe(
            "a red ball",
            seed=0,
            callback_on_step_end=callback,
            callback_on_step_end_tensor_inputs=["latents", "prompt_embeds"],
            output_type="latent",
        )
        assert [step for step, *_ in seen] == [0, 1, 2]
        assert seen[0][1] == 999.0
        assert seen[0][2] == ["latents", "prompt_embeds"]
        assert not np.asarray(output.frames).any()

    def test_callback_changes_the_prompt(self, pipe: WanPipeline):
        def callback(given: object, step: int, timestep: float, arrays: dict[str, Any]):
            del given, step, timestep
            return {"prompt_embeds": arrays["prompt_embeds"] + 1}

        changed = pipe(
            "a red ball",
            seed=0,
            callback_on_step_end=callback,
            callback_on_step_end_tensor_inputs=["prompt_embeds"],
            output_type="latent",
        )
        same = pipe("a red ball", seed=0, output_type="latent")
        assert np.abs(np.asarray(changed.frames) - np.asarray(same.frames)).max() > 1e-4

    def test_progress(self, pipe: WanPipeline):
        calls: list[tuple[str, str, int, int]] = []
        pipe("a red ball", seed=0, progress=lambda *call: calls.append(call))
        denoising = [call[2:] for call in calls if call[0] == "denoising"]
        assert denoising == [(0, 3), (1, 3), (2, 3), (3, 3)]

    def test_schedulers_can_be_replaced(self, pipe: WanPipeline, tmp_path: Path):
        pipe = WanPipeline.from_pretrained(small_pipeline(tmp_path / "model"))
        results = []
        for scheduler in (
            FlowMatchEulerDiscreteScheduler(3.0),
            UniPCMultistepScheduler(3.0),
            UniPCMultistepScheduler(6.0),
        ):
            pipe.scheduler = scheduler
            results.append(np.asarray(pipe("a", seed=0, output_type="latent").frames))
        assert all(np.abs(results[0] - other).max() > 1e-3 for other in results[1:])

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"prompt": " \n"}, "prompt must not be empty"),
            ({"prompt": []}, "prompt must not be an empty list"),
            ({"prompt": "red " * 10}, "prompt must have at most 10 tokens"),
            ({"negative_prompt": "red " * 10}, "negative_prompt must have at most 10 tokens"),
            ({"negative_prompt": ["a", "b"]}, "one string for each of the 1 prompts, got 2"),
            ({"prompt": None}, "give either prompt or prompt_embeds"),
            ({"prompt_embeds": np.zeros((1, 4, 16))}, "give either prompt or prompt_embeds"),
            ({"height": 4}, "height must be at least 8, got 4"),
            ({"num_inference_steps": 0}, "num_inference_steps must be at least 1"),
            ({"guidance_scale": float("nan")}, "guidance_scale must be finite"),
            ({"guidance_scale_2": 2.0}, "guidance_scale_2 is for pipelines with a transformer_2"),
            ({"output_type": "pil"}, "output_type must be one of 'np', 'latent'"),
            (
                {"callback_on_step_end_tensor_inputs": ["noise"]},
                "callback_on_step_end_tensor_inputs must be one of",
            ),
            ({"seed": -1}, "seed must be at least 0"),
            (
                {"seed": 1, "generator": np.random.default_rng()},
                "generator and seed exclude each other",
            ),
            ({"num_videos_per_prompt": 0}, "num_videos_per_prompt must be at least 1"),
            ({"num_videos_per_prompt": 10**9}, "must ask for at most 932067 videos of 18 tokens"),
            ({"num_inference_steps": 10**9}, "num_inference_steps must be at most 65536"),
            ({"max_sequence_length": 10**9}, "max_sequence_length must be at most 16384"),
            (
                {
                    "prompt": None,
                    "prompt_embeds": np.zeros((1, 4, 16), np.float32),
                    "negative_prompt": "dark",
                },
                "negative_prompt needs prompt",
            ),
            (
                {"negative_prompt_embeds": np.zeros((2, 10, 16), np.float32)},
                r"negative_prompt_embeds must be \[1, tokens, 16\], got \(2, 10, 16\)",
            ),
            ({"max_sequence_length": 2}, "prompt must have at most 2 tokens"),
            (
                {"latents": np.zeros((1, 4, 3, 4, 5), np.float32)},
                r"latents must have the shape \(1, 4, 3, 4, 6\)",
            ),
            (
                {"prompt": None, "prompt_embeds": np.zeros((1, 4, 16), np.float32)},
                "needs negative_prompt_embeds",
            ),
            (
                {
                    "prompt": None,
                    "prompt_embeds": np.zeros((1, 4, 15), np.float32),
                    "guidance_scale": 1.0,
                },
                r"prompt_embeds must be \[1, tokens, 16\], got \(1, 4, 15\)",
            ),
        ],
    )
    def test_bad_input_costs_no_weights(
        self,
        pipe: WanPipeline,
        monkeypatch: pytest.MonkeyPatch,
        arguments: dict[str, Any],
        message: str,
    ):
        def refuse(*_: object) -> None:
            raise AssertionError("a model was asked for")

        monkeypatch.setattr("cinetile.models.wan.weights.Part.get", refuse)
        with pytest.raises(ValueError, match=message):
            pipe(**cast(dict[str, Any], {"prompt": "a red ball"}) | arguments)

    def test_plans_run_and_run_again(self, pipe: WanPipeline):
        """A call is its plan and a run; a run takes nothing from the plan."""
        generators = [np.random.default_rng(3) for _ in range(2)]
        called = pipe("a red ball", "dark", generator=generators[0], output_type="latent")
        plan = pipe.plan("a red ball", "dark", generator=generators[1], output_type="latent")
        assert plan.guided
        for planned in (plan, plan, pipe.embedded(plan)):
            np.testing.assert_array_equal(pipe.run(planned).frames, called.frames)
        assert generators[0].integers(2**31) == generators[1].integers(2**31)

    def test_a_plan_keeps_its_scheduler(self, tmp_path: Path):
        pipe = WanPipeline.from_pretrained(small_pipeline(tmp_path / "model"))
        plan = pipe.plan("a", seed=0, output_type="latent")
        expected = pipe.run(plan).frames
        pipe.scheduler = FlowMatchEulerDiscreteScheduler(3.0)
        np.testing.assert_array_equal(pipe.run(plan).frames, expected)

    def test_planning_reads_no_weights(self, pipe: WanPipeline, monkeypatch: pytest.MonkeyPatch):
        def refuse(*_: object) -> None:
            raise AssertionError("a model was asked for")

        monkeypatch.setattr("cinetile.models.wan.weights.Part.get", refuse)
        plan = pipe.plan(["a red ball", "a ball"], num_videos_per_prompt=3)
        assert plan.latents.shape == (6, 4, 3, 4, 6)
        with pytest.raises(ValueError, match="tensor_inputs must be one of"):
            pipe.run(plan, callback_on_step_end_tensor_inputs=["noise"])

    def test_negative_embeddings_beside_a_prompt(self, pipe: WanPipeline):
        _, negative = pipe.encode_prompt("a red ball", "dark")
        arguments: dict[str, Any] = {"seed": 1, "output_type": "latent"}
        given = pipe("a red ball", negative_prompt_embeds=negative, **arguments)
        np.testing.assert_array_equal(given.frames, pipe("a red ball", "dark", **arguments).frames)

    def test_models_can_be_given(self, pipe: WanPipeline):
        built = WanPipeline(
            tokenizer=pipe.tokenizer,
            text_encoder=pipe.text_encoder,
            transformer=pipe.transformer,
            vae=pipe.vae,
            scheduler=pipe.scheduler,
            defaults=pipe.defaults,
        )
        calls: list[Callable[..., Any]] = [pipe, built]
        first, other = (call("a red ball", seed=3, output_type="latent").frames for call in calls)
        np.testing.assert_array_equal(first, other)


class TestTrainedSizes:
    """A checkpoint says at which sizes it was trained."""

    def open(self, tmp_path: Path, **changes: object) -> WanPipeline:
        folder = small_pipeline(tmp_path / "model")
        change_json(folder / "generation.json", **changes)
        return WanPipeline.from_pretrained(folder)

    def test_a_trained_size_is_quiet(self, tmp_path: Path):
        pipe = self.open(tmp_path, trained_sizes=[[5, 8, 8], [3, 16, 24]])
        assert pipe.defaults.trained_sizes == ((5, 8, 8), (3, 16, 24))
        assert pipe.plan("a red ball").is_trained_size

    def test_another_size_warns_of_noise_and_cost_once(self, tmp_path: Path):
        pipe = self.open(tmp_path, trained_sizes=[[3, 16, 24]])
        with pytest.warns(UserWarning, match="trained at 3 frames of 24x16 only") as caught:
            plan = pipe.plan("a red ball", height=32)
        [warning] = caught
        message = str(warning.message)
        assert re.search(
            r"noise at 3 frames of 24x32.* 36 tokens, about \d+\.\d GiB of memory, and about \w+ "
            r"\w+ with dense attention",
            message,
        )
        assert not plan.is_trained_size
        pipe.run(plan)  # warnings are errors: the run repeats none

    def test_cost_grows_with_what_is_asked(self, pipe: WanPipeline):
        def cost(steps: int = 10, videos: int = 1, guided: bool = False, **size: int) -> CallCost:
            planned = pipe.video_size(**size)
            return call_cost(pipe._parts, planned, videos=videos, steps=steps, guided=guided)

        base = cost()
        assert cost(steps=20).operations == 2 * base.operations
        assert cost(guided=True).operations == 2 * base.operations
        assert cost(videos=3).operations == 3 * base.operations
        assert cost(videos=3).memory > base.memory
        # Twice the tokens: twice the products with weights, four times those of attention.
        assert 2 * base.operations < cost(height=32).operations < 4 * base.operations

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            (((3, 16),), r"trained_sizes\[0\] must be \[num_frames, height, width\]"),
            (((3, 0, 24),), r"trained_sizes\[0\] must be at least 1"),
        ],
    )
    def test_bad_sizes(self, sizes: Any, message: str):
        with pytest.raises(ValueError, match=message):
            GenerationDefaults(trained_sizes=sizes)

    @pytest.mark.parametrize(
        ("seconds", "words"),
        [(0.2, "a second"), (119.0, "119 seconds"), (600.0, "10 minutes"), (9000.0, "2 hours")],
    )
    def test_duration(self, seconds: float, words: str):
        assert duration(seconds) == words


class TestPolicy:
    policy = ct.SparsityPolicy(
        density=0.5,
        dense_steps=((0, 1),),
        dense_layers=((0, 1),),
        width_multiple=1,
        block_q=6,
        block_kv=6,
    )

    def test_routes_are_recorded_by_step_and_layer(self, pipe: WanPipeline):
        arguments: dict[str, Any] = {"seed": 4, "output_type": "latent"}
        sparse = pipe("a red ball", policy=self.policy, return_records=True, **arguments)
        dense = pipe("a red ball", **arguments)
        assert np.abs(np.asarray(sparse.frames) - np.asarray(dense.frames)).max() > 1e-3
        assert len(sparse.records) == 3
        for step, pair in enumerate(sparse.records):
            for record in pair:
                assert isinstance(record, ct.LayerRecord)
                assert np.asarray(record.routes).shape == (2, 1, 2)
                assert np.asarray(record.step).tolist() == [step] * 2
                assert np.asarray(record.layer).tolist() == [0, 1]
                assert np.asarray(record.is_dense).tolist() == [True, step == 0]

    def test_a_dense_policy_changes_nothing(self, pipe: WanPipeline):
        policy = replace(self.policy, dense_steps=((0, None),))
        arguments: dict[str, Any] = {"seed": 4, "output_type": "latent"}
        first, other = (pipe("a red ball", policy=p, **arguments).frames for p in (policy, None))
        np.testing.assert_allclose(first, other, atol=1e-4)

    def test_implementations_agree(self, pipe: WanPipeline):
        size = pipe.video_size()
        first, _ = pipe.attentions(size, 2, self.policy, ("reference", "xla"))
        assert isinstance(first, ct.SparseAttention)
        assert first.implementation == ("reference", "xla")
        dense, _ = pipe.attentions(size, 2, None, ["xla"])
        assert isinstance(dense, DenseAttention)
        assert dense.planned.implementation.name == "xla"

    @pytest.mark.filterwarnings("ignore:density .* is lost:UserWarning")
    def test_each_expert_has_its_own(self, tmp_path: Path):
        pipe = WanPipeline.from_pretrained(two_experts(GOLDEN, tmp_path))
        policy = ct.SparsityPolicy.preset("moderate")
        plan = pipe.plan("a red ball", height=32, width=32, num_frames=5, policy=policy)
        pair: tuple[Any, Any] = plan.attentions
        assert [first.expert for first in pair] == ["high_noise", "low_noise"]
        assert {(first.num_steps, first.num_layers) for first in pair} == {(50, 2)}

    def test_excluded(self, pipe: WanPipeline):
        excluded: list[dict[str, Any]] = [{"policy": self.policy}, {"implementation": "xla"}]
        for arguments in excluded:
            with pytest.raises(ValueError, match=r"attention and \w+ exclude each other"):
                pipe("a red ball", attention=Watching(), **arguments)


def test_random_weights() -> None:
    """What benchmarks build: weights of unit gain, the same in every dtype."""
    wide, narrow = (
        np.asarray(random_weight(jax.random.key(0), (40, 24), 24, jnp.dtype(dtype)), np.float32)
        for dtype in ("float32", "bfloat16")
    )
    assert 0.9 < wide.std() * 24**0.5 < 1.1
    np.testing.assert_allclose(narrow, wide, rtol=2**-7)
