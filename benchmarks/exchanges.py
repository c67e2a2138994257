"""What each exchange sends and leaves uneven at standard shapes, as Markdown tables.

python -m benchmarks.exchanges

From shapes alone: nothing runs.
"""

import cinetile as ct
from cinetile.parallel import exchange_report

DENSITY, HEADS, HEAD_DIM = 0.35, 40, 128
VIDEOS = {"480p": (480, 832), "720p": (720, 1280), "1080p": (1072, 1920), "1440p": (1440, 2560)}
MIB = 1 << 20


def main() -> None:
    print("| video | mask | devices | ring | heads | halo | halo, queries stay |")
    print("|---|---|---|---|---|---|---|")
    for video, (height, width) in VIDEOS.items():
        grid = ct.TokenGrid.from_video(81, height, width)
        for mask in (ct.spatial_mask(grid, DENSITY), ct.temporal_mask(grid, DENSITY)):
            for devices in (2, 4, 8):
                schemes = exchange_report(mask, devices=devices, heads=HEADS, head_dim=HEAD_DIM)
                cells = [
                    f"{scheme.sent_bytes / MIB:,.0f} MiB, {scheme.imbalance:.2%}"
                    for scheme in schemes
                ]
                print(f"| {video} | {mask.name} | {devices} | {' | '.join(cells)} |")
    print("\n| heads | batch | devices | imbalance |")
    print("|---|---|---|---|")
    mask = ct.spatial_mask(ct.TokenGrid.from_video(81, 480, 832), DENSITY)
    for heads, batch in ((40, 1), (40, 2), (12, 1), (12, 2)):
        for devices in (2, 4, 8):
            scheme = exchange_report(
                mask, devices=devices, heads=heads, head_dim=HEAD_DIM, batch=batch
            )[1]
            print(f"| {heads} | {batch} | {devices} | {scheme.imbalance:.1%} |")
    print("\n| video | pairs of a temporal plan against a spatial one |")
    print("|---|---|")
    policy = ct.SparsityPolicy(DENSITY, dense_steps=(), dense_layers=())
    for video, (height, width) in VIDEOS.items():
        grid = ct.TokenGrid.from_video(81, height, width)
        layer = ct.SparseAttention(grid, policy, implementation=("xla",))
        _, spatial, temporal = (plan.stats.kept_pairs for plan in layer.planned.plans)
        print(f"| {video} | {temporal / spatial - 1:+.2%} |")


if __name__ == "__main__":
    main()
