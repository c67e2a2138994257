"""Trains the small checkpoint: `python -m training.tiny_wan.train FOLDER`.

Run it again with the same folder to continue: the state is saved every minute and at Ctrl-C. Each
process uses one thread, which keeps its pace on a busy machine; helpers add cores.
"""

import argparse
import csv
import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, multiprocessing

from training.tiny_wan import flow, scenes
from training.tiny_wan.muon import Optimizer

EMPTY_CAPTION_SHARE = 0.1
EMA = 0.995
SAVE_SECONDS = 60.0
LOG_STEPS = 20
MAX_STALENESS = 3  # steps by which a helper's gradient may lag

Params = dict[str, Tensor]


@dataclass(frozen=True)
class Stage:
    """A stretch of training on one kind of data.

    Attributes:
        steps: how many steps.
        batch: videos a process and step.
        frames: of the nine, evenly strided.
        variety: how much the videos differ.
        shift: how near to pure noise the noise levels lie.
        rate: the learning rate at the start, as a factor.
        last_rate: the same at the end; it changes linearly over the stage.
    """

    steps: int
    batch: int
    frames: int
    variety: scenes.Variety
    shift: float = 5.0
    rate: float = 1.0
    last_rate: float = 1.0


RECIPE = (
    Stage(steps=240, batch=16, frames=3, variety=scenes.EASY, shift=12.0),
    Stage(steps=460, batch=8, frames=5, variety=scenes.HARD),
    Stage(steps=600, batch=8, frames=9, variety=scenes.HARD, shift=4.0, last_rate=0.8),
    Stage(steps=1100, batch=8, frames=9, variety=scenes.HARD, rate=0.8, shift=3.0, last_rate=0.02),
)


def stage_at(step: int) -> tuple[Stage, float] | None:
    """The stage of a step and the factor on its learning rates; None after the last step."""
    first = 0
    for stage in RECIPE:
        if step < first + stage.steps:
            warm_up = min(1.0, (step - first + 1) / 20)
            share = (step - first) / stage.steps
            return stage, warm_up * (stage.rate + (stage.last_rate - stage.rate) * share)
        first += stage.steps
    return None


@dataclass
class Data:
    """Draws batches; the two generators are its whole state."""

    rng: np.random.Generator
    noise: torch.Generator

    @classmethod
    def seeded(cls, seed: int) -> "Data":
        """Data that follow from a seed."""
        return cls(np.random.default_rng(seed), torch.Generator().manual_seed(seed))

    def loss(self, system: flow.System, params: Params, stage: Stage) -> Tensor:
        """The loss of a new batch."""
        known = scenes.training_scenes()
        chosen = [
            scenes.with_post(known[index])
            if self.rng.random() < stage.variety.post
            else known[index]
            for index in self.rng.integers(len(known), size=stage.batch)
        ]
        videos = [scenes.render(scene, self.rng, stage.variety, stage.frames) for scene in chosen]
        captions = [
            "" if self.rng.random() < EMPTY_CAPTION_SHARE else scenes.caption(scene, self.rng)
            for scene in chosen
        ]
        latents = torch.from_numpy(system.codec.encode(np.stack(videos))).float()
        moment = flow.moments(stage.batch, stage.shift, self.noise)
        return flow.training_loss(system, params, latents, captions, moment, self.noise)


class Exchange:
    """Shared memory between the trainer and its helpers, one slot of gradients for each."""

    def __init__(self, params: Params, helpers: int) -> None:
        """Makes room for the weights and for `helpers` gradients."""
        self.params = {
            name: value.detach().clone().share_memory_() for name, value in params.items()
        }
        self.gradients = [
            {name: torch.zeros_like(value).share_memory_() for name, value in params.items()}
            for _ in range(helpers)
        ]
        context = multiprocessing.get_context("spawn")
        self.step: Synchronized = context.Value("q", -1)
        # The step that a slot's gradient belongs to, or -1 while the slot is free.
        self.filled: list[Synchronized] = [context.Value("q", -1) for _ in range(helpers)]

    def publish(self, params: Params, step: int) -> None:
        """Shows the weights of a step to the helpers."""
        for name, value in params.items():
            self.params[name].copy_(value.detach())
        self.step.value = step

    def collect(self, params: Params, step: int) -> int:
        """Averages fresh gradients of helpers into those of `params`; returns how many."""
        used = 1
        for slot, filled in zip(self.gradients, self.filled, strict=True):
            if filled.value < 0:
                continue
            if step - filled.value <= MAX_STALENESS:
                used += 1
                for name, value in params.items():
                    if value.grad is not None:
                        value.grad.add_(slot[name])
            filled.value = -1
        for value in params.values():
            if used > 1 and value.grad is not None:
                value.grad.div_(used)
        return used


def help_out(exchange: Exchange, index: int, seed: int) -> None:
    """A helper's life: gradients of its own batches at the newest weights, for ever."""
    torch.set_num_threads(1)
    system = flow.make_system(compiled=True)
    data = Data.seeded(seed)
    slot, filled = exchange.gradients[index], exchange.filled[index]
    parent = os.getppid()
    while os.getppid() == parent:
        step = exchange.step.value
        at = stage_at(step) if step >= 0 else None
        if at is None or filled.value >= 0:
            time.sleep(0.01)
            continue
        params = {name: value.clone().requires_grad_() for name, value in exchange.params.items()}
        data.loss(system, params, at[0]).backward()
        for name, value in params.items():
            gradient = torch.zeros_like(value) if value.grad is None else value.grad
            slot[name].copy_(gradient)
        filled.value = step


class Run:
    """The weights, their running mean, the optimizer and the place in the recipe, on disk."""

    def __init__(self, folder: Path, system: flow.System) -> None:
        """Continues the run in `folder`, or starts one."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "state.pt"
        start = system.init(torch.Generator().manual_seed(0))
        self.params = {name: value.requires_grad_() for name, value in start.items()}
        self.average = {name: value.detach().clone() for name, value in start.items()}
        self.optimizer = Optimizer(self.params)
        self.step = 0
        if self._path.exists():
            state = torch.load(self._path)
            for name, value in self.params.items():
                value.data.copy_(state["params"][name])
            self.average = state["average"]
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]

    def save(self) -> None:
        """Replaces the saved state, in one move so that no half of it is ever there."""
        state = {
            "params": {name: value.detach() for name, value in self.params.items()},
            "average": self.average,
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
        }
        torch.save(state, self._path.with_suffix(".tmp"))
        self._path.with_suffix(".tmp").replace(self._path)

    @torch.no_grad()
    def advance(self, rate: float) -> None:
        """Takes one optimizer step and follows it with the mean."""
        self.optimizer.step(rate)
        self.step += 1
        decay = min(EMA, (1 + self.step) / (10 + self.step))
        for name, value in self.average.items():
            value.lerp_(self.params[name], 1 - decay)


class Log:
    """Appends a line to `log.csv` for every few steps."""

    def __init__(self, folder: Path) -> None:
        """Continues the file in `folder`, or starts one."""
        self._path = folder / "log.csv"
        self._started = time.monotonic()
        self._losses: list[float] = []
        self._videos = 0
        if not self._path.exists():
            self._write("step", "seconds", "videos", "frames", "rate", "loss")

    def add(self, step: int, stage: Stage, rate: float, videos: int, loss: float) -> None:
        """Takes the figures of one step."""
        self._losses.append(loss)
        self._videos += videos
        if step % LOG_STEPS == 0:
            seconds = time.monotonic() - self._started
            mean = sum(self._losses) / len(self._losses)
            self._write(
                step, round(seconds), self._videos, stage.frames, f"{rate:.3f}", f"{mean:.4f}"
            )
            self._losses.clear()
            self._videos = 0

    def _write(self, *fields: object) -> None:
        with self._path.open("a", newline="") as file:
            csv.writer(file).writerow(fields)


def train(folder: Path, helpers: int, minutes: float) -> None:
    """Trains until the recipe or the time is over, and saves the state."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    system = flow.make_system(compiled=True)
    run = Run(folder, system)
    log = Log(folder)
    data = Data.seeded(1000 + run.step)  # a continued run draws new videos
    exchange = Exchange(run.params, helpers)
    context = multiprocessing.get_context("spawn")
    for index in range(helpers):
        seed = 1_000_000 * (index + 1) + run.step
        context.Process(target=help_out, args=(exchange, index, seed), daemon=True).start()

    started = saved = time.monotonic()
    try:
        while (at := stage_at(run.step)) and time.monotonic() - started < 60 * minutes:
            stage, rate = at
            exchange.publish(run.params, run.step)
            loss = data.loss(system, run.params, stage)
            loss.backward()
            videos = stage.batch * exchange.collect(run.params, run.step)
            run.advance(rate)
            log.add(run.step, stage, rate, videos, loss.item())
            if time.monotonic() - saved > SAVE_SECONDS:
                run.save()
                saved = time.monotonic()
    finally:
        run.save()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the state and the log are kept")
    parser.add_argument("--helpers", type=int, default=1, help="more processes, one core each")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time")
    arguments = parser.parse_args()
    train(arguments.folder, arguments.helpers, arguments.minutes)


if __name__ == "__main__":
    main()
