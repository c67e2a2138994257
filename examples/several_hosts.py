"""A video from several hosts: start it once on each.

On TPU slices and under Slurm jax finds the processes by itself:

    python examples/several_hosts.py --model FOLDER --out cat.mp4 "a cat on a windowsill"

To try it on one machine, with one virtual device in each of two processes:

    JAX_PLATFORMS=cpu python -m cinetile.parallel.launch --processes 2 \
      examples/several_hosts.py --model FOLDER --out cat.mp4 "a cat on a windowsill"
"""

import argparse

import jax
import numpy as np

import cinetile as ct
from cinetile.models.video import write_video
from cinetile.models.wan import WanPipeline
from cinetile.parallel import joined_processes, make_mesh


def main() -> None:
    """Makes the video on all devices of all hosts; the first process writes it."""
    parser = argparse.ArgumentParser(description="A video from several hosts.")
    parser.add_argument("prompt")
    parser.add_argument("--model", required=True, help="folder in diffusers' layout")
    parser.add_argument("--out", required=True, help="video file to write")
    parser.add_argument("--policy", default="moderate", help="a preset")
    options = parser.parse_args()
    with joined_processes():  # before anything makes jax start
        # The guidance pair over two halves of the devices, tokens over those of each half.
        mesh = make_mesh({"data": 2, "sequence": jax.device_count() // 2})
        pipe = WanPipeline.from_pretrained(options.model, keep_text_encoder=False, mesh=mesh)
        policy = ct.SparsityPolicy.preset(options.policy)
        output = pipe(options.prompt, seed=0, policy=policy)
        if jax.process_index() == 0:
            write_video(options.out, np.asarray(output.frames[0]), fps=pipe.defaults.fps)


if __name__ == "__main__":
    main()
