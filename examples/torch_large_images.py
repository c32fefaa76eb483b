"""Images that are too large for one rank: each is cut along its height, its width, or both.

    python examples/torch_large_images.py                                 # one rank, whole images
    hvdlite-run -np 4 python examples/torch_large_images.py               # cut along the width
    hvdlite-run -np 4 python examples/torch_large_images.py --grid 4 1    # along the height
    hvdlite-run -np 4 python examples/torch_large_images.py --grid 2 2    # 2 x 2 patches

A network learns to mark the bright rings in noisy synthetic images. Each rank loads whole images,
keeps its patch of each, and computes that patch of the answer; convolutions exchange the edges of
the patches. At the end rank 0 trains the same network on whole images, and compares the weights.
The lines marked "hvdlite:" are all that cuts the images.
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor, nn

import hvdlite.torch as hvd
from hvdlite.data import slice_batch


def make_network() -> nn.Sequential:
    """Two levels of resolution; a pooled window lies in one patch."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2),
        nn.Conv2d(8, 1, 3, padding=1),
    )  # fmt: skip


def make_batch(images: int, size: int, step: int) -> tuple[Tensor, Tensor]:
    """Noisy images of rings, and the masks of these; the same on all ranks."""
    generator = torch.Generator().manual_seed(step)
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    centres = torch.rand(images, 2, 1, 1, generator=generator) * size
    radius = (rows - centres[:, 0]).square() + (columns - centres[:, 1]).square()
    masks = ((radius.sqrt() - size / 4).abs() < size / 16).float().unsqueeze(1)
    return masks + 0.5 * torch.randn(masks.shape, generator=generator), masks


def train(network: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace) -> float:
    """Return the last loss: the mean over the pixels of this rank."""
    loss = torch.zeros(())
    for step in range(args.steps):
        batch = make_batch(args.images, args.size, step)
        if args.cut:
            batch = slice_batch(batch, patches=tuple(args.grid))  # hvdlite: its patch of each image
        images, masks = batch
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(network(images), masks)
        loss.backward()
        optimizer.step()
    return loss.item()


def cut_images(network: nn.Module, rows: int, columns: int) -> None:
    """Make the convolutions exchange edges with the patches above, below, left and right."""
    ranks = torch.arange(rows * columns).view(rows, columns)
    row, column = divmod(hvd.rank(), columns)
    for dim, lines, own in ((2, ranks.T.tolist(), column), (3, ranks.tolist(), row)):
        if len(lines[0]) > 1:  # hvdlite: all ranks make all sets, and use their own line of patches
            sets = [hvd.global_process_set]
            if len(lines) > 1:
                sets = [hvd.add_process_set(line) for line in lines]
            hvd.SpatialConv2d.wrap(network, dim, sets[own])


def main() -> None:
    """Train on patches, then compare with whole images."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grid", type=int, nargs=2, metavar=("ROWS", "COLUMNS"), help="of patches")
    parser.add_argument("--size", type=int, default=256, help="height and width of an image")
    parser.add_argument("--images", type=int, default=2, help="in a batch")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()

    hvd.init()
    args.grid = args.grid or [1, hvd.size()]
    rows, columns = args.grid
    if rows * columns != hvd.size():
        parser.error(f"--grid {rows} {columns} has {rows * columns} patches for {hvd.size()} ranks")
    torch.manual_seed(0)
    network = make_network()
    whole = copy.deepcopy(network)
    cut_images(network, rows, columns)
    # hvdlite: each rank's loss is a mean over its patch, so gradients are averaged
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9), network.named_parameters()
    )
    args.cut = True
    loss = hvd.allreduce(torch.tensor(train(network, optimizer, args)), name="loss").item()
    if hvd.rank() == 0:
        args.cut = False
        alone = train(whole, torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9), args)
        pairs = zip(network.parameters(), whole.parameters(), strict=True)
        difference = max((one - other).abs().max().item() for one, other in pairs)
        print(
            f"{rows} x {columns} patches: loss {loss:.6f}, whole images {alone:.6f}, "
            f"weights differ by {difference:.1e} at most"
        )


if __name__ == "__main__":
    main()
