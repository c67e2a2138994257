"""Sparse attention in diffusers pipelines: every family, and what users do with a pipeline."""

# diffusers exports its names lazily, which pyright does not follow.
# pyright: reportPrivateImportUsage=false

import copy
import dataclasses
import filecmp
import functools
import io
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

import diffusers
import torch
import torch.nn.functional as F  # noqa: N812
from diffusers import FlowMatchEulerDiscreteScheduler, WanVideoToVideoPipeline
from PIL import Image
from tiny_pipelines import NONE, PIPELINES, STEPS, TinyPipeline
from torch.overrides import TorchFunctionMode

import cinetile as ct
import cinetile.integrations.diffusers as ctd
from cinetile.integrations.diffusers.processors import SparseProcessor
from cinetile.integrations.diffusers.tensors import runner_for
from cinetile.kernels.cpu.native import load_library
from cinetile.lab import pictures
from cinetile.layer.layer_plan import plan_layer

EXACT: dict[str, Any] = {"mode": "split", "block_q": 16, "block_kv": 8, "width_multiple": 4}
POLICY = ct.SparsityPolicy(0.4, dense_steps=((0, 1),), dense_layers=((0, 1),), **EXACT)
EVERYTHING = ct.SparsityPolicy(1.0, dense_steps=(), dense_layers=(), **EXACT)
SPARSE = ct.SparsityPolicy(0.4, dense_steps=(), dense_layers=(), **EXACT)
SCHEDULERS = (
    "DDIMScheduler",
    "DDPMScheduler",
    "DEISMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "EulerAncestralDiscreteScheduler",
    "EulerDiscreteScheduler",
    "FlowMatchEulerDiscreteScheduler",
    "FlowMatchHeunDiscreteScheduler",
    "HeunDiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "KDPM2DiscreteScheduler",
    "LCMScheduler",
    "PNDMScheduler",
    "SASolverScheduler",
    "TCDScheduler",
    "UniPCMultistepScheduler",
)
WAN = PIPELINES[0]
EXPERTS = PIPELINES[1]

# LTXConditionPipeline hands tensors to NumPy in a way that NumPy 2 deprecates.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
)

every_family = pytest.mark.parametrize("tiny", PIPELINES, ids=str)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@functools.cache
def dense_result(tiny: TinyPipeline) -> torch.Tensor:
    return tiny.run(tiny.build())


def named(name: str) -> TinyPipeline:
    return next(tiny for tiny in PIPELINES if tiny.name == name)


def transformers(pipe: Any) -> dict[str, Any]:
    models = {name: getattr(pipe, name, None) for name in ("transformer", "transformer_2")}
    return {name: model for name, model in models.items() if model is not None}


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


class _MaskedAttention(TorchFunctionMode):
    """PyTorch's own attention with a boolean mask for each head."""

    def __init__(self, keep: torch.Tensor) -> None:
        super().__init__()
        self.keep = keep

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            mask = kwargs.get("attn_mask")
            kwargs["attn_mask"] = self.keep if mask is None else self.keep & mask
        return func(*args, **kwargs)


class MaskedProcessor:
    """Stands in for a layer's processor with the masks that a run has recorded."""

    def __init__(self, original: Any, masks: Iterator[torch.Tensor]) -> None:
        self.original = original
        self.masks = masks
        vars(self)["__call__"] = original.__call__  # the signature by which layers pass arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _MaskedAttention(next(self.masks)):
            return self.original(*args, **kwargs)


def keep_of(call: ct.LayerRecord, policy: ct.SparsityPolicy, expert: str | None) -> torch.Tensor:
    """Pairs that the heads of a call keep, [batch, heads, queries, keys], from the masks alone."""
    assert call.grid is not None
    planned = plan_layer(policy, call.grid, num_steps=call.num_steps, num_layers=3, expert=expert)
    assert planned.choices == call.choices
    masks = np.stack([plan.mask.to_dense() for plan in planned.plans])
    return torch.from_numpy(masks[call.routes])


@every_family
class TestFamilies:
    def test_density_one_is_the_original(self, tiny: TinyPipeline) -> None:
        pipe = tiny.build()
        with ctd.enable_sparse_attention(pipe, EVERYTHING) as handle:
            found = tiny.run(pipe)
        close(found, dense_result(tiny))
        assert len(handle.summary().calls) == STEPS * tiny.passes * tiny.num_layers
        assert not any(call.is_dense for call in handle.summary().calls)

    def test_routed_output_is_attention_under_the_masks(self, tiny: TinyPipeline) -> None:
        pipe = tiny.build()
        with ctd.enable_sparse_attention(pipe, POLICY) as handle:
            found = tiny.run(pipe)
        calls = handle.summary().calls
        assert {
            str(call.choices[route]) for call in calls for route in np.asarray(call.routes).flat
        } >= {
            "dense",
            "temporal 0.4",
        }
        experts = {"transformer": None, "transformer_2": None}
        if len(transformers(pipe)) == 2:
            experts = {"transformer": "high_noise", "transformer_2": "low_noise"}
        family = ctd.FAMILIES[[item.name for item in ctd.FAMILIES].index(tiny.family)]
        for component, model in transformers(pipe).items():
            for index, layer in enumerate(family.layers(model)):
                masks = iter(
                    [
                        keep_of(call, POLICY, experts[component])
                        for call in calls
                        if (call.component, call.layer) == (component, index)
                    ]
                )
                layer.set_processor(MaskedProcessor(layer.processor, masks))
        close(tiny.run(pipe), found)
        assert (found - dense_result(tiny)).abs().max() > 1e-3

    def test_only_self_attention_is_touched(self, tiny: TinyPipeline) -> None:
        pipe = tiny.build()
        before = processors(pipe)
        with ctd.enable_sparse_attention(pipe, POLICY):
            after = processors(pipe)
        changed = {name for name in before if before[name] is not after[name]}
        assert len(changed) == tiny.num_layers * len(transformers(pipe))
        for name in before:
            assert (name in changed) == isinstance(after[name], SparseProcessor)
            assert name not in changed or ".attn1" in name or name.endswith(".attn")
            assert "refiner" not in name or name not in changed

    def test_restore_is_exact(self, tiny: TinyPipeline) -> None:
        pipe = tiny.build()
        before = processors(pipe), hooks(pipe)
        handle = ctd.enable_sparse_attention(pipe, POLICY)
        tiny.run(pipe)
        handle.restore()
        after = processors(pipe), hooks(pipe)
        assert before[0].keys() == after[0].keys()
        assert all(before[0][name] is after[0][name] for name in before[0])
        assert before[1] == after[1]
        assert torch.equal(tiny.run(pipe), dense_result(tiny))
        handle.restore()

    def test_summary(self, tiny: TinyPipeline, tmp_path: Path) -> None:
        pipe = tiny.build()
        handle = ctd.enable_sparse_attention(pipe, POLICY)
        assert str(handle.summary()) == f"{tiny.family}: nothing has run yet"
        tiny.run(pipe)
        summary = handle.summary()
        places = [(call.step, call.forward, call.layer) for call in summary.calls]
        assert places == [
            (step, step * tiny.passes + item, layer)
            for step in range(STEPS)
            for item in range(tiny.passes)
            for layer in range(tiny.num_layers)
        ]
        for call in summary.calls:
            assert call.grid == tiny.grid
            assert call.num_steps == STEPS
            assert call.is_dense == (call.step == 0 or call.layer == 0)
            assert call.routes.shape == (tiny.rows, 2)
            assert sum(call.heads_by_choice.values()) == 2 * tiny.rows
            assert call.is_dense == (not call.is_sampled)
            assert str(call.implementation).startswith("cpu (")
            assert (call.visited == 1.0) == call.is_dense
        assert summary.sparse_calls == (STEPS - 1) * tiny.passes * (tiny.num_layers - 1)
        rows = summary.rows()
        assert len(rows) == len(summary.calls)
        assert rows[0]["heads"] == {"dense": 2 * tiny.rows}
        table = summary.routes()
        assert len(table.entries) == 2 * tiny.rows * len(summary.calls)
        pictures.route_picture(table, tmp_path / "routes.png")
        assert (tmp_path / "routes.png").stat().st_size > 0
        words = str(summary)
        assert f"{summary.sparse_calls} of {len(rows)} self-attention calls sparse" in words
        assert "transformer, step 0 of 3: layers 0-2 dense" in words


def processors(pipe: Any) -> dict[str, Any]:
    return {
        f"{component}.{name}": module.processor
        for component, model in transformers(pipe).items()
        for name, module in model.named_modules()
        if hasattr(module, "processor")
    }


def hooks(pipe: Any) -> list[Any]:
    return [
        [dict(model._forward_pre_hooks), dict(model._forward_hooks)]
        for model in transformers(pipe).values()
    ]


class TestTracking:
    def calls(self, tiny: TinyPipeline, **changes: Any) -> tuple[ct.LayerRecord, ...]:
        pipe = tiny.build()
        with ctd.enable_sparse_attention(pipe, POLICY) as handle:
            tiny.run(pipe, **changes)
        return handle.summary().calls

    def test_experts_share_the_schedule(self) -> None:
        calls = self.calls(EXPERTS)
        components = {(call.component, call.step) for call in calls}
        assert components == {("transformer", 0), ("transformer", 1), ("transformer_2", 2)}

    def test_experts_have_densities_of_their_own(self) -> None:
        rules = (
            ct.DensityRule(0.6, expert="high_noise"),
            ct.DensityRule(0.3, expert="low_noise"),
        )
        policy = ct.SparsityPolicy(0.4, rules, dense_steps=(), dense_layers=(), **EXACT)
        pipe = EXPERTS.build()
        with ctd.enable_sparse_attention(pipe, policy) as handle:
            EXPERTS.run(pipe)
        densities = {
            (call.component, call.choices[route].density)
            for call in handle.summary().calls
            for route in np.asarray(call.routes).flat
        }
        assert densities == {("transformer", 0.6), ("transformer_2", 0.3)}

    @pytest.mark.filterwarnings("ignore:density .* is lost:UserWarning")
    def test_any_size(self) -> None:
        pipe = WAN.build()
        with ctd.enable_sparse_attention(pipe, POLICY) as handle:
            for frames, height, width in ((5, 48, 32), (9, 32, 80)):
                WAN.run(pipe, num_frames=frames, height=height, width=width)
                grid = ct.TokenGrid.from_video(frames, height, width)
                assert {call.grid for call in handle.summary().calls} == {grid}

    def test_without_guidance(self) -> None:
        assert len(self.calls(WAN, guidance_scale=1.0)) == STEPS * WAN.num_layers

    def test_several_videos_of_a_prompt(self) -> None:
        calls = self.calls(WAN, num_videos_per_prompt=2)
        assert {call.routes.shape for call in calls} == {(2, 2)}

    def test_the_summary_is_of_the_latest_run(self) -> None:
        pipe = WAN.build()
        with ctd.enable_sparse_attention(pipe, POLICY) as handle:
            WAN.run(pipe)
            WAN.run(pipe, num_inference_steps=1)
            calls = handle.summary().calls
            WAN.run(pipe, num_inference_steps=1)
            assert len(handle.summary().calls) == len(calls) == 2 * WAN.num_layers
        assert {call.num_steps for call in calls} == {1}

    def test_a_run_over_part_of_a_schedule(self) -> None:
        """Steps count from the start of the schedule, whoever calls the model."""
        pipe = WAN.build()
        pipe.scheduler.set_timesteps(5)
        with ctd.enable_sparse_attention(pipe, POLICY) as handle, torch.no_grad():
            for time in pipe.scheduler.timesteps[2:4]:
                call_model(pipe, time.expand(1))
        assert [call.step for call in handle.summary().calls] == [2] * 3 + [3] * 3

    def test_video_to_video(self) -> None:
        base = WAN.build()
        pipe: Any = WanVideoToVideoPipeline(
            tokenizer=NONE,
            text_encoder=NONE,
            vae=base.vae,
            transformer=base.transformer,
            scheduler=base.scheduler,
        )
        pipe.set_progress_bar_config(disable=True)
        frames = [Image.new("RGB", (80, 64), (shade, 0, 0)) for shade in range(17)]
        with ctd.enable_sparse_attention(pipe, POLICY) as handle:
            pipe(
                video=frames,
                height=64,
                width=80,
                num_inference_steps=5,
                strength=0.6,
                output_type="latent",
                **WAN.arguments(),
            )
        assert {(call.step, call.num_steps) for call in handle.summary().calls} == {
            (2, 5),
            (3, 5),
            (4, 5),
        }

    def test_timesteps_in_bfloat16(self) -> None:
        pipe = WAN.build()
        pipe.scheduler.set_timesteps(5)
        times = pipe.scheduler.timesteps.to(torch.bfloat16)
        with ctd.enable_sparse_attention(pipe, POLICY) as handle, torch.no_grad():
            for time in times:
                call_model(pipe, time.expand(1))
        assert [call.step for call in handle.summary().calls[::3]] == [0, 1, 2, 3, 4]

    def test_equal_timesteps_are_told_apart_by_the_scheduler(self) -> None:
        pipe = WAN.build()
        pipe.scheduler.timesteps = torch.tensor([999, 998, 998, 500])
        arguments = {"timestep": torch.tensor([998])}
        with pytest.raises(
            ValueError, match=r"that of the steps 1, 2 of 4, and UniPC.*begin_index"
        ):
            ctd.step_by_timestep(pipe, arguments)
        pipe.scheduler.set_begin_index(1)
        assert ctd.step_by_timestep(pipe, arguments).step == 1
        pipe.scheduler._step_index = 2
        assert ctd.step_by_timestep(pipe, arguments).step == 2

    @pytest.mark.parametrize("shift", [3.0, 7.0, 12.0])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("widened", [False, True])
    def test_steps_are_exact_in_any_dtype(
        self, shift: float, dtype: torch.dtype, widened: bool
    ) -> None:
        """As in loops that give the model its timesteps in the model's dtype, twice a step."""
        scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=shift)
        scheduler.set_timesteps(50)
        pipe = SimpleNamespace(scheduler=scheduler)
        found = []
        sample = torch.zeros(1)
        for time in scheduler.timesteps:
            given = time.to(dtype).float() if widened else time.to(dtype)
            pair = [ctd.step_by_timestep(pipe, {"timestep": given.expand(2)}) for _ in range(2)]
            assert pair[0].step == pair[1].step
            found.append(pair[0].step)
            sample = scheduler.step(sample, time, sample, return_dict=False)[0]
        assert found == list(range(50))

    @pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context:DeprecationWarning")
    @pytest.mark.parametrize("name", SCHEDULERS)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, None])
    def test_schedulers(self, name: str, dtype: torch.dtype | None) -> None:
        """Also those of second order, whose schedules hold timesteps twice."""
        scheduler = getattr(diffusers, name)()
        scheduler.set_timesteps(20)
        pipe = SimpleNamespace(scheduler=scheduler)
        sample = torch.ones(1, 1, 4, 4)
        for index, time in enumerate(scheduler.timesteps):
            if hasattr(scheduler, "scale_model_input"):
                scheduler.scale_model_input(sample, time)
            given = time if dtype is None else time.to(dtype)
            assert ctd.step_by_timestep(pipe, {"timestep": given}).step == index
            sample = scheduler.step(0.1 * sample, time, sample).prev_sample

    def test_a_scheduler_that_does_not_run(self) -> None:
        """A loop around another scheduler, whose 25 steps are among the 50 of the pipeline's."""
        pipe = WAN.build()
        pipe.scheduler = FlowMatchEulerDiscreteScheduler()
        other: Any = FlowMatchEulerDiscreteScheduler()
        with ctd.enable_sparse_attention(pipe, POLICY) as handle, torch.no_grad():
            WAN.run(pipe, num_inference_steps=2)
            other.set_timesteps(sigmas=[1.0])
            with pytest.raises(ValueError, match=r"stands at step 2, .* handle\.running\(pipe\)"):
                call_model(pipe, other.timesteps[:1])
            with handle.running(SimpleNamespace(scheduler=other)):
                call_model(pipe, other.timesteps[:1])
            assert [(call.step, call.num_steps) for call in handle.summary().calls] == [(0, 1)] * 3
            with pytest.raises(TypeError, match="pipe must have a scheduler, got object"):
                handle.running(object())

    def test_a_timestep_that_no_schedule_has(self) -> None:
        pipe = WAN.build()
        pipe.scheduler.set_timesteps(5)
        with (
            ctd.enable_sparse_attention(pipe, POLICY),
            torch.no_grad(),
            pytest.raises(ValueError, match=r"timestep 20 is not in the schedule of 5 steps, 999"),
        ):
            call_model(pipe, torch.tensor([20]))

    def test_a_scheduler_without_a_schedule(self) -> None:
        """Schedulers differ in what they hold until they have a schedule."""
        for scheduler in (None, FlowMatchEulerDiscreteScheduler(shift=3.0)):
            pipe = WAN.build()
            pipe.scheduler = scheduler or pipe.scheduler
            message = r"the scheduler of WanPipeline has no schedule yet, .*handle\.running\(pipe\)"
            with (
                ctd.enable_sparse_attention(pipe, POLICY),
                torch.no_grad(),
                pytest.raises(ValueError, match=message),
            ):
                call_model(pipe, torch.tensor([999]))

    def test_tokens_of_images_beside_the_video(self) -> None:
        """LTX puts those of a later frame before the video's, with coordinates of their own."""
        tiny = named("ltx-condition")
        pipe = tiny.build()
        with (
            ctd.enable_sparse_attention(pipe, POLICY),
            pytest.raises(ValueError, match="video_coords that are not those of one video"),
        ):
            tiny.run(pipe, frame_index=8)

    def test_steps_that_are_not_in_the_schedule(self) -> None:
        for step in (-1, 3):
            with pytest.raises(ValueError, match=rf"step must lie in \[0, 3\), got {step}"):
                ctd.StepInRun(step, 3, None)

    def test_the_same_seed_gives_the_same_video(self) -> None:
        results = []
        for seed in (0, 0):
            pipe = WAN.build()
            with ctd.enable_sparse_attention(pipe, POLICY, seed=seed):
                results.append(WAN.run(pipe))
        assert torch.equal(*results)


def call_model(pipe: Any, timestep: torch.Tensor) -> Any:
    return pipe.transformer(
        hidden_states=torch.zeros(1, 16, 5, 8, 10),
        timestep=timestep,
        encoder_hidden_states=torch.zeros(1, 8, 32),
        return_dict=False,
    )


class TestConventions:
    def test_enabling_twice(self) -> None:
        pipe = WAN.build()
        handle = ctd.enable_sparse_attention(pipe, POLICY)
        with pytest.raises(ValueError, match=r"pipe.transformer has sparse attention already"):
            ctd.enable_sparse_attention(pipe, POLICY)
        handle.restore()
        ctd.enable_sparse_attention(pipe, POLICY).restore()

    def test_a_restored_handle_is_not_entered(self) -> None:
        handle = ctd.enable_sparse_attention(WAN.build(), POLICY)
        handle.restore()
        with pytest.raises(RuntimeError, match="own attention was restored"), handle:
            pass

    @pytest.mark.parametrize(
        "duplicate",
        [copy.deepcopy, lambda pipe: torch.save(pipe.transformer, io.BytesIO())],
        ids=["copied", "pickled"],
    )
    def test_copies_are_refused(self, duplicate: Any) -> None:
        """They would be bound to the original."""
        pipe = WAN.build()
        with (
            ctd.enable_sparse_attention(pipe, POLICY),
            pytest.raises(TypeError, match=r"can be neither copied nor pickled; call restore\(\)"),
        ):
            duplicate(pipe)
        duplicate(pipe)

    def test_another_transformer(self) -> None:
        """It would run densely."""
        pipe, other = EXPERTS.build(), WAN.build()
        mine = pipe.transformer_2
        handle = ctd.enable_sparse_attention(pipe, POLICY)
        pipe.transformer_2 = other.transformer
        message = "pipe.transformer_2 was replaced by another WanTransformer3DModel"
        with pytest.raises(RuntimeError, match=message):
            EXPERTS.run(pipe)
        with pytest.raises(RuntimeError, match=message):
            handle.summary()
        pipe.transformer_2 = None  # to save memory, as users do
        assert handle.summary().calls == ()
        handle.restore()
        assert not any(isinstance(item, SparseProcessor) for item in mine.attn_processors.values())

    def test_another_block(self) -> None:
        """It would run densely."""
        pipe, other = WAN.build(), WAN.build()
        with ctd.enable_sparse_attention(pipe, POLICY):
            pipe.transformer.blocks[1] = other.transformer.blocks[1]
            message = r"layers of pipe\.transformer were added, removed or replaced"
            with pytest.raises(RuntimeError, match=message):
                WAN.run(pipe)

    def test_a_transformer_in_two_pipelines(self) -> None:
        pipe, other = WAN.build(), WAN.build()
        other.transformer = pipe.transformer
        with (
            ctd.enable_sparse_attention(pipe, POLICY),
            pytest.raises(ValueError, match="already"),
        ):
            ctd.enable_sparse_attention(other, POLICY)

    def test_several_pipelines_at_once(self) -> None:
        first, second = WAN.build(), named("ltx").build()
        with (
            ctd.enable_sparse_attention(first, POLICY) as item,
            ctd.enable_sparse_attention(second, SPARSE) as other,
        ):
            WAN.run(first)
            named("ltx").run(second)
            assert (item.summary().family, other.summary().family) == (WAN.family, "LTX-Video")
            assert item.summary().sparse_calls < len(item.summary().calls)
            assert other.summary().sparse_calls == len(other.summary().calls)

    def test_pipelines_in_threads_of_their_own(self) -> None:
        pipes = [WAN.build(), named("ltx").build()]
        runs = [WAN.run, named("ltx").run]
        handles = [ctd.enable_sparse_attention(pipe, SPARSE) for pipe in pipes]
        expected = [run(pipe) for run, pipe in zip(runs, pipes, strict=True)]
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(lambda run, pipe: run(pipe), runs, pipes))
        assert all(map(torch.equal, found, expected))
        for handle in handles:
            assert handle.summary().sparse_calls == len(handle.summary().calls) > 0

    def test_an_exception_inside_a_run(self) -> None:
        pipe = WAN.build()

        def stop(*_: Any) -> Any:
            raise KeyboardInterrupt

        with ctd.enable_sparse_attention(pipe, POLICY) as handle:
            with pytest.raises(KeyboardInterrupt):
                WAN.run(pipe, callback_on_step_end=stop)
            assert {int(call.step) for call in handle.summary().calls} == {0}
            WAN.run(pipe)
            assert len(handle.summary().calls) == STEPS * 2 * WAN.num_layers
        assert torch.equal(WAN.run(pipe), dense_result(WAN))

    def test_an_exception_inside_the_model(self) -> None:
        pipe = WAN.build()
        pipe.scheduler.set_timesteps(3)
        with ctd.enable_sparse_attention(pipe, POLICY):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                pipe.transformer(
                    hidden_states=torch.zeros(1, 16, 5, 8, 10),
                    timestep=torch.tensor([999]),
                    encoder_hidden_states=torch.zeros(1, 8, 31),
                )
            layer = pipe.transformer.blocks[0].attn1
            with pytest.raises(RuntimeError, match="outside the model's forward"):
                layer(torch.zeros(1, 100, 24))

    def test_saving(self, tmp_path: Path) -> None:
        pipe = WAN.build()
        pipe.save_pretrained(tmp_path / "dense")
        with ctd.enable_sparse_attention(pipe, POLICY):
            WAN.run(pipe)
            pipe.save_pretrained(tmp_path / "sparse")
        files = sorted(
            path.relative_to(tmp_path / "dense")
            for path in (tmp_path / "dense").rglob("*")
            if path.is_file()
        )
        assert len(files) > 3
        same, *different = filecmp.cmpfiles(
            tmp_path / "dense", tmp_path / "sparse", [str(file) for file in files], shallow=False
        )
        assert (len(same), different) == (len(files), [[], []])

    @pytest.mark.usefixtures("fresh_compiler")
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_compiled(self, when: str) -> None:
        pipe = WAN.build()
        with ctd.enable_sparse_attention(pipe, POLICY):
            expected = WAN.run(pipe)
        if when == "before":
            pipe.transformer = torch.compile(pipe.transformer, backend="eager")
        with ctd.enable_sparse_attention(pipe, POLICY) as handle:
            if when == "after":
                pipe.transformer = torch.compile(pipe.transformer, backend="eager")
            close(WAN.run(pipe), expected)
            assert len(handle.summary().calls) == STEPS * 2 * WAN.num_layers
        close(WAN.run(pipe), dense_result(WAN))

    @pytest.mark.usefixtures("fresh_compiler")
    def test_compiled_as_one_graph_is_refused(self) -> None:
        pipe = WAN.build()
        with ctd.enable_sparse_attention(pipe, POLICY):
            pipe.transformer = torch.compile(pipe.transformer, backend="eager", fullgraph=True)
            with pytest.raises(Exception, match=r"cannot be traced; compile with fullgraph=False"):
                WAN.run(pipe)

    def test_processors_that_others_replace(self) -> None:
        pipe = WAN.build()
        handle = ctd.enable_sparse_attention(pipe, POLICY)
        layer = pipe.transformer.blocks[1].attn1
        ours = layer.processor
        layer.set_processor(ours.original)
        message = "layer 1 of pipe.transformer was replaced by WanAttnProcessor"
        with pytest.raises(RuntimeError, match=message):
            WAN.run(pipe)
        with pytest.raises(RuntimeError, match=message):
            handle.restore()
        layer.set_processor(ours)
        handle.restore()
        assert torch.equal(WAN.run(pipe), dense_result(WAN))

    def test_another_backend_of_the_model(self) -> None:
        pipe = WAN.build()
        with ctd.enable_sparse_attention(pipe, POLICY):
            pipe.transformer.set_attention_backend("flex")
            with pytest.raises(Exception, match=r"set_attention_backend\('native'\)|flex"):
                WAN.run(pipe)
            pipe.transformer.set_attention_backend("_native_math")
            WAN.run(pipe)
        assert pipe.transformer.blocks[0].attn1.processor._attention_backend == "_native_math"

    def test_fused_projections(self) -> None:
        pipe = WAN.build()
        pipe.transformer.fuse_qkv_projections()
        with ctd.enable_sparse_attention(pipe, EVERYTHING):
            close(WAN.run(pipe), dense_result(WAN))


class TestServers:
    """One transformer, and a pipeline with a scheduler of its own for each request."""

    def copy_of(self, pipe: Any) -> Any:
        copied = diffusers.WanPipeline(
            tokenizer=NONE,
            text_encoder=NONE,
            vae=pipe.vae,
            transformer=pipe.transformer,
            scheduler=type(pipe.scheduler).from_config(pipe.scheduler.config),
        )
        copied.set_progress_bar_config(disable=True)
        return copied

    def test_the_schedule_is_that_of_the_running_pipeline(self) -> None:
        pipe = WAN.build()
        other = self.copy_of(pipe)
        with ctd.enable_sparse_attention(other, POLICY):
            expected = WAN.run(other, num_inference_steps=2)
        with ctd.enable_sparse_attention(pipe, POLICY) as handle:
            WAN.run(pipe, num_inference_steps=4)
            assert torch.equal(WAN.run(other, num_inference_steps=2), expected)
            for which, steps in ((None, 2), (other, 2), (pipe, 4)):
                calls = handle.summary(which).calls
                assert {(call.step, call.num_steps) for call in calls} == {
                    (step, steps) for step in range(steps)
                }
                assert len(calls) == 2 * steps * WAN.num_layers

    def test_threads(self) -> None:
        pipe = WAN.build()
        steps = [2, 3, 4, 5]
        with ctd.enable_sparse_attention(pipe, POLICY):
            expected = [WAN.run(pipe, num_inference_steps=count) for count in steps]
        with ctd.enable_sparse_attention(pipe, POLICY) as handle:
            copies = [self.copy_of(pipe) for _ in steps]

            def request(index: int) -> Any:
                found = WAN.run(copies[index], num_inference_steps=steps[index])
                return found, handle.summary(copies[index]).calls

            with ThreadPoolExecutor(len(steps)) as pool:
                results = list(pool.map(request, range(len(steps))))
        for (found, calls), wanted, count in zip(results, expected, steps, strict=True):
            assert torch.equal(found, wanted)
            assert [call.forward for call in calls[:: WAN.num_layers]] == list(range(2 * count))

    def test_wrapped_by_peft(self) -> None:
        """The wrapper's `forward` calls the model it wraps."""

        class PeftModel(torch.nn.Module):
            def __init__(self, model: Any) -> None:
                super().__init__()
                self.base_model = model
                self.config = model.config
                self.dtype = model.dtype
                self.cache_context = model.cache_context

            def get_base_model(self) -> Any:
                return self.base_model

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return self.base_model(*args, **kwargs)

        pipe = WAN.build()
        with ctd.enable_sparse_attention(pipe, POLICY):
            expected = WAN.run(pipe)
        model = pipe.transformer
        wrapped = SimpleNamespace(transformer=PeftModel(model), scheduler=pipe.scheduler)
        with ctd.enable_sparse_attention(wrapped, POLICY) as handle:
            assert torch.equal(WAN.run(pipe), expected)
            assert handle.summary(pipe).sparse_calls

    def test_in_a_forked_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pipe = WAN.build()
        with ctd.enable_sparse_attention(pipe, POLICY):
            monkeypatch.setattr(os, "getpid", lambda: -1)
            message = r"before this one, -1, was forked from it, .*get_context\(\"spawn\"\)"
            with pytest.raises(RuntimeError, match=message):
                WAN.run(pipe)
            with pytest.raises(RuntimeError, match=message):
                ctd.enable_sparse_attention(WAN.build(), POLICY)
            monkeypatch.undo()
            WAN.run(pipe)


class TestTensors:
    def test_another_default_device(self) -> None:
        """Tensors are made where the arguments are; a pointer elsewhere ended the process."""
        pipe = WAN.build()
        pipe.scheduler.set_timesteps(3)
        time = pipe.scheduler.timesteps[1:2]
        with ctd.enable_sparse_attention(pipe, SPARSE), torch.no_grad():
            expected = call_model(pipe, time)
            attention = tensor_attention(SPARSE, WAN.grid)
            arrays = tensors_on(WAN.grid)
            options: dict[str, Any] = {"step": 1, "layer": 1, "scale": 0.5, "prompt_length": None}
            wanted, _ = attention.attend(*arrays, **options)
            with torch.device("meta"):
                found, _ = attention.attend(*arrays, **options)
                step = ctd.step_by_timestep(pipe, {"timestep": float(time)}).step
        assert torch.equal(found, wanted)
        assert step == 1
        del expected

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision(self, dtype: torch.dtype) -> None:
        pipe = WAN.build()
        pipe.transformer.to(dtype)
        dense = WAN.run(pipe)
        with ctd.enable_sparse_attention(pipe, EVERYTHING):
            np.testing.assert_allclose(WAN.run(pipe), dense, rtol=0.1, atol=0.1)

    def test_inference_mode(self) -> None:
        pipe = WAN.build()
        with ctd.enable_sparse_attention(pipe, EVERYTHING), torch.inference_mode():
            close(WAN.run(pipe), dense_result(WAN))

    def test_float64_is_refused(self) -> None:
        pipe = WAN.build()
        pipe.transformer.to(torch.float64)
        with (
            ctd.enable_sparse_attention(pipe, POLICY),
            pytest.raises(
                TypeError, match=r"query must be float32, bfloat16 or float16, got torch\.float64"
            ),
        ):
            WAN.run(pipe)

    def test_gradients_are_refused(self) -> None:
        pipe = WAN.build()
        pipe.scheduler.set_timesteps(3)
        with (
            ctd.enable_sparse_attention(pipe, POLICY),
            pytest.raises(RuntimeError, match="has no gradients"),
        ):
            call_model(pipe, torch.tensor([999]))

    def test_tokens_that_are_not_of_the_grid(self) -> None:
        pipe = WAN.build()

        def shorter(call: ctd.Call) -> tuple[int, int, int]:
            _, _, frames, height, width = call.shape("hidden_states")
            return frames - 1, height // 2, width // 2

        wan = ctd.FAMILIES[0]
        family = ctd.Family("other", wan.models, (), wan.self_attention, shorter)
        with (
            ctd.enable_sparse_attention(pipe, POLICY, family=family),
            pytest.raises(ValueError, match=r"has 100 tokens, but .* 4x4x5 = 80 tokens"),
        ):
            WAN.run(pipe)

    def test_no_copy_and_the_threads_of_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The kernel is given the tensors' own memory, tokens first or heads first."""
        from cinetile.integrations.diffusers import tensors

        seen: list[Any] = []
        call = tensors.DirectAttention.__call__
        attend = tensors.TensorAttention.attend

        def watched_call(self: Any, *operands: Any, **options: Any) -> None:
            seen[-1] += [operand.address for operand in operands[:3]], options["num_threads"]
            call(self, *operands, **options)

        def watched_attend(self: Any, *arrays: Any, **options: Any) -> Any:
            seen.append(([array.data_ptr() for array in arrays],))
            return attend(self, *arrays, **options)

        monkeypatch.setattr(tensors.DirectAttention, "__call__", watched_call)
        monkeypatch.setattr(tensors.TensorAttention, "attend", watched_attend)
        torch.set_num_threads(3)
        for tiny in (WAN, named("cogvideox")):
            pipe = tiny.build()
            with ctd.enable_sparse_attention(pipe, POLICY):
                tiny.run(pipe)
        assert seen
        for given, passed, threads in seen:
            assert given == passed
            assert threads == 3

    def test_tensors_without_memory(self) -> None:
        """As those of sharded models between their uses: a size, but no bytes."""
        runner = runner_for(tensor_attention(SPARSE, WAN.grid).planned, on_jax=False)
        query, key, value = tensors_on(WAN.grid)
        for missing in (value.nbytes, 4):
            short = value.clone()
            short.untyped_storage().resize_(short.nbytes - missing)
            with pytest.raises(ValueError, match=r"ends? at byte 12,800 of"):
                runner(query, key, short, np.zeros((1, 2), np.int32), 0.5, None)

    def test_features_with_gaps(self) -> None:
        attention = tensor_attention(SPARSE, WAN.grid)
        query, key, value = tensors_on(WAN.grid)
        options: dict[str, Any] = {"step": 1, "layer": 1, "scale": 0.5, "prompt_length": None}
        wide = torch.zeros(*query.shape[:3], 2 * query.shape[3])
        wide[..., ::2] = query
        expected, _ = attention.attend(query, key, value, **options)
        found, _ = attention.attend(wide[..., ::2], key, value, **options)
        assert torch.equal(found, expected)

    @pytest.mark.parametrize("probe", ["plan", "svg"])
    def test_same_as_the_module_of_jax(self, probe: str) -> None:
        """Routes, errors and output are those of `ct.SparseAttention` with the same seed."""
        import jax

        policy = ct.SparsityPolicy(0.4, dense_steps=((0, 1),), probe=probe, **EXACT)
        attention = tensor_attention(policy, WAN.grid)
        module = ct.SparseAttention(
            WAN.grid, policy, num_steps=STEPS, num_layers=3, dtype="float32", implementation="cpu"
        )
        arrays = tensors_on(WAN.grid)
        for step, layer in ((0, 1), (1, 0), (1, 1), (2, 2)):
            found, done = attention.attend(
                *arrays, step=step, layer=layer, scale=0.5, prompt_length=None
            )
            output, record = module(
                *(array.numpy() for array in arrays),
                step=step,
                layer=layer,
                rng=jax.random.key(0),
                scale=0.5,
                return_record=True,
            )
            np.testing.assert_array_equal(done.routes, record.routes)
            np.testing.assert_allclose(found, output, rtol=1e-6, atol=1e-6)
            np.testing.assert_array_equal(done.errors, record.errors)


def tensor_attention(policy: ct.SparsityPolicy, grid: ct.TokenGrid) -> Any:
    from cinetile.integrations.diffusers.tensors import TensorAttention

    return TensorAttention(
        grid, STEPS, 3, None, torch.float32, False, policy=policy, implementation=None, seed=0
    )


def tensors_on(grid: ct.TokenGrid) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, grid.num_tokens, 2, 16, generator=generator) for _ in "qkv"]


class TestImplementations:
    def test_by_name(self) -> None:
        pipe = WAN.build()
        with ctd.enable_sparse_attention(pipe, POLICY):
            expected = WAN.run(pipe)
        with ctd.enable_sparse_attention(pipe, POLICY, implementation="xla") as handle:
            close(WAN.run(pipe), expected)
        assert handle.summary().implementations == ("xla through DLPack",)

    def test_without_the_native_library_the_summary_tells(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("cinetile.kernels.cpu.implementation.load_library", lambda: "not built")
        pipe = WAN.build()
        with ctd.enable_sparse_attention(pipe, EVERYTHING) as handle:
            close(WAN.run(pipe), dense_result(WAN))
        assert handle.summary().implementations == ("xla through DLPack",)
        with pytest.raises(NotImplementedError, match="cpu: not built"):
            ctd.enable_sparse_attention(pipe, POLICY, implementation="cpu")

    def test_the_native_one_is_built_here(self) -> None:
        assert not isinstance(load_library(), str)


class TestPromptMasks:
    GRID = ct.TokenGrid(2, 2, 2, text_tokens=4)

    def length(self, mask: torch.Tensor | None, grid: ct.TokenGrid = GRID) -> Any:
        from cinetile.integrations.diffusers.processors import prompt_length_of

        return prompt_length_of(mask, 2, grid)

    def test_lengths(self) -> None:
        mask = torch.ones(2, 1, 1, 12, dtype=torch.bool)
        assert self.length(None) is None
        assert self.length(mask) is None
        mask[0, ..., 9:] = False
        np.testing.assert_array_equal(self.length(mask), [1, 4])
        np.testing.assert_array_equal(self.length(mask[:1].expand(1, 3, 12, 12)), [1, 1])

    def test_text_in_front(self) -> None:
        grid = ct.TokenGrid(2, 2, 2, text_tokens=4, text_first=True)
        mask = torch.ones(1, 1, 1, 12, dtype=torch.bool)
        mask[..., 3] = False
        np.testing.assert_array_equal(self.length(mask, grid), [3, 3])

    @pytest.mark.parametrize(
        "mask",
        [
            torch.arange(12).reshape(1, 1, 1, 12) != 9,
            torch.arange(12).reshape(1, 1, 1, 12) != 0,
            torch.ones(12, 12, dtype=torch.bool).tril().reshape(1, 1, 12, 12),
            torch.zeros(1, 1, 1, 12),
            torch.ones(1, 1, 1, 11, dtype=torch.bool),
        ],
        ids=["hole-in-text", "no-first-frame", "causal", "additive", "shorter"],
    )
    def test_other_masks_are_refused(self, mask: torch.Tensor) -> None:
        with pytest.raises(ValueError, match="none of the end of its text"):
            self.length(mask)


@pytest.mark.usefixtures("unchecked")
class TestBadArguments:
    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"policy": 0.5}, TypeError, "policy must be a SparsityPolicy or a preset's name"),
            ({"policy": "fast"}, ValueError, "policy must be one of 'conservative'"),
            ({"family": "wan"}, TypeError, "family must be a Family, got str"),
            ({"seed": -1}, ValueError, "seed must be at least 0"),
            ({"implementation": 3}, TypeError, "implementation must be None, a name, an Impl"),
            ({"implementation": "cuda"}, ValueError, "implementation must be None, one of"),
            ({"implementation": "pallas_tpu"}, NotImplementedError, "not on a TPU"),
        ],
        ids=str,
    )
    def test_refused(self, options: Any, error: type[Exception], message: str) -> None:
        pipe = WAN.build()
        before = processors(pipe)
        with pytest.raises(error, match=message):
            ctd.enable_sparse_attention(pipe, **options)
        assert processors(pipe) == before

    def test_an_unknown_pipeline(self) -> None:
        class Strange:
            transformer = torch.nn.Linear(1, 1)

        message = (
            r"got Strange with Linear. Supported: Wan 2.1 and 2.2 \(WanTransformer3DModel\); "
            r"HunyuanVideo .*Family\(\.\.\.\), .*docs/howto/diffusers.md"
        )
        with pytest.raises(ValueError, match=message):
            ctd.enable_sparse_attention(Strange())
        with pytest.raises(ValueError, match="got object with no transformer"):
            ctd.enable_sparse_attention(object())
        with pytest.raises(ValueError, match=r"pipe must be the pipeline, .*WanTransformer3D"):
            ctd.enable_sparse_attention(WAN.build().transformer)

    @pytest.mark.parametrize(
        "paths",
        [
            ("layers.*.attn",),
            ("*.attn1",),
            ("blocks",),
            ("blocks.*",),
            ("blocks.attn1",),
            ("blocks.*.attn1", "blocks.*.attn3"),
        ],
        ids=str,
    )
    def test_a_family_that_does_not_fit(self, paths: tuple[str, ...]) -> None:
        """No path is passed over: what it means to make sparse would stay dense."""
        family = ctd.Family("other", (), (), paths, ctd.FAMILIES[0].video_grid)
        place = re.escape(paths[-1])
        message = rf"family other has its self-attention at {place}, but Wan.* no attention proc"
        with pytest.raises(ValueError, match=message):
            ctd.enable_sparse_attention(WAN.build(), family=family)

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"self_attention": "blocks.*.attn1"}, TypeError, "self_attention must be a tuple of"),
            ({"self_attention": ()}, ValueError, "self_attention must not be empty"),
            ({"components": ()}, ValueError, "components must not be empty"),
            ({"text": "middle"}, ValueError, "text must be one of 'none', 'first', 'last'"),
            ({"video_grid": (5, 4, 5)}, TypeError, "video_grid must be a function"),
            ({"step": 3}, TypeError, "step must be a function, got 3"),
        ],
        ids=str,
    )
    def test_a_wrong_description(self, changes: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            dataclasses.replace(ctd.FAMILIES[0], **changes)

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            (
                {"video_grid": lambda _: (5, 4)},
                ValueError,
                r"video_grid of family Wan .* must give frames, height and width, got \(5, 4\)",
            ),
            ({"step": lambda *_: 3}, TypeError, "step of family Wan .* must give a StepInRun"),
        ],
        ids=["video_grid", "step"],
    )
    def test_what_a_description_gives(
        self, changes: Any, error: type[Exception], message: str
    ) -> None:
        pipe = WAN.build()
        family = dataclasses.replace(ctd.FAMILIES[0], **changes)
        with (
            ctd.enable_sparse_attention(pipe, POLICY, family=family),
            pytest.raises(error, match=message),
        ):
            WAN.run(pipe)
