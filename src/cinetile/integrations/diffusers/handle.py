"""`enable_sparse_attention`, and what undoes it."""

import dataclasses
import functools
import inspect
import operator
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from cinetile import _checks
from cinetile.grid import TokenGrid
from cinetile.integrations.diffusers.families import Call, Family, family_of, unknown_model
from cinetile.integrations.diffusers.processors import (
    Hook,
    SparseProcessor,
    processor_for,
    prompt_length_of,
)
from cinetile.integrations.diffusers.running import (
    Run,
    Runs,
    check_process,
    component,
    named,
    running_pipeline,
)
from cinetile.integrations.diffusers.summary import Summary
from cinetile.integrations.diffusers.tensors import TensorAttention, check_tensors, is_torchax
from cinetile.integrations.diffusers.tracking import StepInRun
from cinetile.kernels.registry import select_implementation
from cinetile.policy import SparsityPolicy
from cinetile.policy.presets import PRESETS


def enable_sparse_attention(
    pipe: Any,
    policy: SparsityPolicy | str = "moderate",
    *,
    family: Family | None = None,
    implementation: str | Sequence[str] | None = None,
    seed: int = 0,
) -> "SparseHandle":
    """Makes self-attention in a diffusers pipeline sparse, until the handle is told to restore.

    The pipeline is called as before. Its self-attention runs by the policy, at each step and
    layer; cross-attention and everything else stay as they are. Resolution, length and batch are
    taken from each call. For inference on a CPU, in float32, bfloat16 or float16.

    Args:
        pipe: the pipeline, or anything with its transformers and its scheduler.
        policy: what is sparse, when and how; or the name of a preset.
        family: what the model is like; by default the one of `FAMILIES` that it belongs to.
        implementation: as for `cinetile.attention`. By default the native kernel, or where
            it was not built the best that can run; the summary says which.
        seed: of the rows on which heads are routed; equal seeds give equal videos.

    Returns:
        A handle, which is a context manager too: its end restores.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the family is unknown, or the pipeline's attention is sparse already.
        NotImplementedError: the named implementation cannot run here.
    """
    if isinstance(policy, str):
        policy = SparsityPolicy.preset(_checks.choice("policy", policy, tuple(PRESETS)))
    if not isinstance(policy, SparsityPolicy):
        raise TypeError(
            f"policy must be a SparsityPolicy or a preset's name, got {type(policy).__name__}"
        )
    if family is not None and not isinstance(family, Family):
        raise TypeError(f"family must be a Family, got {type(family).__name__}")
    seed = _checks.integer("seed", seed, minimum=0)
    check_process()
    select_implementation(implementation, None)
    models = _models(pipe, family)
    family = family or family_of(next(iter(models.values())))
    assert family is not None
    for name, model in models.items():
        for layer in family.layers(model):
            if isinstance(layer.processor, SparseProcessor):
                raise ValueError(
                    f"pipe.{name} has sparse attention already; call restore() of its handle first"
                )
    return SparseHandle(pipe, policy, family, implementation, seed, models)


def _models(pipe: Any, family: Family | None) -> dict[str, Any]:
    """The pipeline's transformers by attribute, without the wrappers of torch.compile and PEFT."""
    names = family.components if family else ("transformer", "transformer_2")
    found = {name: component(pipe, name) for name in names}
    found = {name: model for name, model in found.items() if model is not None}
    known = family is not None or all(family_of(model) for model in found.values())
    if not found or not known:
        raise unknown_model(pipe, [type(model).__name__ for model in found.values()])
    return found


@dataclass(eq=False)
class _Model:
    """One transformer whose self-attention is sparse."""

    component: str
    module: Any
    expert: str | None
    layers: tuple[Any, ...]
    processors: tuple[SparseProcessor, ...] = ()
    hooks: list[Any] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Forward:
    """The call of a model that is going on in this context, and the one around it."""

    model: _Model
    run: Run
    number: int
    where: StepInRun
    grid: TokenGrid
    outer: "_Forward | None"


# Of each thread its own, so that requests around one transformer do not meet.
_FORWARD: ContextVar[_Forward | None] = ContextVar("cinetile_forward", default=None)


class SparseHandle:
    """Sparse attention in a pipeline: what ran, and the way back.

    Made by `enable_sparse_attention`.
    """

    def __init__(
        self,
        pipe: Any,
        policy: SparsityPolicy,
        family: Family,
        implementation: str | Sequence[str] | None,
        seed: int,
        models: dict[str, Any],
    ) -> None:
        self.policy = policy
        self.family = family
        self._pipe = pipe
        self._implementation = implementation
        self._seed = seed
        self._attentions: dict[Any, TensorAttention] = {}
        self._lock = threading.Lock()
        self._runs = Runs()
        experts = ("high_noise", "low_noise") if len(models) == 2 else (None,)
        if len(models) == 1 and "transformer_2" in models:
            experts = ("low_noise",)
        self._models: list[_Model] = []
        for (name, module), expert in zip(models.items(), experts, strict=True):
            model = _Model(name, module, expert, family.layers(module))
            model.processors = tuple(
                processor_for(layer.processor, functools.partial(self._attend, model, index))
                for index, layer in enumerate(model.layers)
            )
            for layer, processor in zip(model.layers, model.processors, strict=True):
                layer.set_processor(processor)
            begin = Hook(functools.partial(self._begin, model))
            end = Hook(functools.partial(self._end, model))
            model.hooks = [
                module.register_forward_pre_hook(begin, with_kwargs=True),
                module.register_forward_hook(end, always_call=True),
            ]
            self._models.append(model)

    def summary(self, pipe: Any = None) -> Summary:
        """What ran in the run that began last, or what has run so far of it.

        Args:
            pipe: the pipeline whose latest run is meant, where several share the transformer; by
                default whichever began last.

        Raises:
            RuntimeError: the pipeline has another transformer by now, whose runs are not known.
        """
        self._check_components()
        return Summary(self.family.name, self._runs.calls(pipe))

    def running(self, pipe: Any) -> AbstractContextManager[None]:
        """A context in which the steps are those of this pipeline's scheduler.

        For denoising loops of your own with a scheduler that is not the one of the pipeline that
        was enabled. A pipeline that is called needs none: it is found by itself.

        Args:
            pipe: the pipeline, or anything with a `scheduler`.

        Raises:
            TypeError: it has no scheduler.
        """
        if getattr(pipe, "scheduler", None) is None:
            raise TypeError(f"pipe must have a scheduler, got {type(pipe).__name__}")
        return named(pipe)

    def restore(self) -> None:
        """Puts the model's own processors back; does nothing the second time.

        Raises:
            RuntimeError: processors were replaced meanwhile. Nothing is changed then.
        """
        for model in self._models:
            self._check_processors(model)
        for model in self._models:
            for layer, processor in zip(model.layers, model.processors, strict=True):
                layer.set_processor(processor.original)
            for hook in model.hooks:
                hook.remove()
        self._models = []

    def __enter__(self) -> "SparseHandle":
        if not self._models:
            raise RuntimeError(
                "the pipeline's own attention was restored; call enable_sparse_attention again"
            )
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()

    def __repr__(self) -> str:
        state = "sparse" if self._models else "restored"
        return f"SparseHandle({self.family.name}, {type(self._pipe).__name__}, {state})"

    def _check_components(self) -> None:
        for model in self._models:
            found = component(self._pipe, model.component)
            if found is not None and found is not model.module:
                raise RuntimeError(
                    f"pipe.{model.component} was replaced by another {type(found).__name__} after "
                    "sparse attention had been enabled, and that one is dense; call restore(), "
                    "and enable again"
                )

    def _check_layers(self, model: _Model) -> None:
        layers = self.family.layers(model.module)
        if len(layers) != len(model.layers) or any(map(operator.is_not, layers, model.layers)):
            raise RuntimeError(
                f"self-attention layers of pipe.{model.component} were added, removed or replaced "
                "after sparse attention had been enabled; call restore(), and enable again"
            )

    def _check_processors(self, model: _Model) -> None:
        for index, (layer, processor) in enumerate(
            zip(model.layers, model.processors, strict=True)
        ):
            if layer.processor is not processor:
                raise RuntimeError(
                    f"the processor of self-attention layer {index} of pipe.{model.component} was "
                    f"replaced by {type(layer.processor).__name__} after sparse attention had "
                    "been enabled; undo that first, and do it before enabling"
                )

    def _begin(self, model: _Model, module: Any, args: Any, kwargs: Any) -> None:
        """Takes the step and the grid from a call of a transformer that begins."""
        check_process()
        self._check_components()
        self._check_layers(model)
        self._check_processors(model)
        bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
        call = Call(module.config, bound.arguments)
        pipe = running_pipeline(module, self.family.components, self._pipe)
        where = self.family.step(pipe, call.arguments)
        if not isinstance(where, StepInRun):
            raise TypeError(
                f"step of family {self.family.name} must give a StepInRun, got {where!r}"
            )
        grid = self.family.grid(call)
        run, number = self._runs.begin_forward(where.schedule, pipe)
        _FORWARD.set(_Forward(model, run, number, where, grid, _FORWARD.get()))

    def _end(self, model: _Model, *_: Any) -> None:
        forward = _FORWARD.get()
        if forward is not None and forward.model is model:
            _FORWARD.set(forward.outer)

    def _attend(
        self,
        model: _Model,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """In place of `scaled_dot_product_attention`."""
        forward = _FORWARD.get()
        if forward is None or forward.model is not model:
            raise RuntimeError(
                f"self-attention of pipe.{model.component} was called outside the model's "
                "forward, so its token grid is not known"
            )
        if dropout_p or is_causal or enable_gqa:
            raise NotImplementedError(
                "sparse attention takes no dropout, causal mask or grouped heads, got "
                f"dropout_p={dropout_p}, is_causal={is_causal}, enable_gqa={enable_gqa}"
            )
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        check_tensors(query, key, value, forward.grid)
        prompt_length = prompt_length_of(attn_mask, query.shape[0], forward.grid)
        where = forward.where
        attention = self._attention(model, forward, query.dtype, is_torchax(query))
        output, record = attention.attend(
            query,
            key,
            value,
            step=where.step,
            layer=layer,
            scale=query.shape[3] ** -0.5 if scale is None else scale,
            prompt_length=prompt_length,
        )
        forward.run.calls.append(
            dataclasses.replace(record, component=model.component, forward=forward.number)
        )
        return output.transpose(1, 2)

    def _attention(
        self, model: _Model, forward: _Forward, dtype: torch.dtype, on_jax: bool
    ) -> TensorAttention:
        """Plans are made once for a grid and a number of steps."""
        grid, num_steps, num_layers = forward.grid, forward.where.num_steps, len(model.layers)
        settings = (grid, num_steps, num_layers, model.expert, dtype, on_jax)
        with self._lock:
            if settings not in self._attentions:
                self._attentions[settings] = TensorAttention(
                    *settings,
                    policy=self.policy,
                    implementation=self._implementation,
                    seed=self._seed,
                )
            return self._attentions[settings]
