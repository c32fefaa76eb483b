"""What one rank can see to be wrong at the call; nothing is sent then.

Every function raises `ValueError` that names the collective, the values and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

# The name of the backend, and the devices whose tensors it takes.


BACKEND = "hvdlite"
URL = f"{BACKEND}://"


def devices() -> list[str]:
    """Return the device types of tensors: those that torch has a backend for, with streams.

    One that is not among them keeps its vendor's backend as the default.
    """
    known = dist.Backend.default_device_backend_map
    return ["cpu", "cuda", *(kind for kind in known if kind not in ("cpu", "cuda", "mps"))]


def is_available(kind: str) -> bool:
    """Return whether this process can use a device of an accelerator's type."""
    module = getattr(torch, kind, None)
    return module is not None and bool(module.is_available())


def writable(what: str, tensors: Sequence[torch.Tensor]) -> None:
    """Check that results can be written: contiguous memory of a device that hvdlite reaches."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(
                f"{what}: an output of shape {tuple(tensor.shape)} and strides {tensor.stride()} "
                "is not contiguous: give tensor.contiguous() and copy the result back"
            )
    readable(what, tensors)


def readable(what: str, tensors: Sequence[torch.Tensor]) -> None:
    """Check that the tensors are on a device that hvdlite reaches."""
    for tensor in tensors:
        if not tensor.is_cpu and tensor.device.type not in devices():
            raise ValueError(
                f"{what}: a tensor is on {tensor.device.type!r}, and hvdlite reaches those on "
                f"{' and '.join(devices())} only: move it with tensor.cpu()"
            )


def same_number(what: str, outputs: Sequence[object], inputs: Sequence[object]) -> None:
    """Check that there is an output for each input."""
    if len(outputs) != len(inputs):
        raise ValueError(f"{what}: {len(outputs)} outputs for {len(inputs)} inputs")


def gathered(what: str, output: torch.Tensor, tensor: torch.Tensor, ranks: int) -> None:
    """Check that the inputs of all ranks fit into one output."""
    _same_dtype(what, output, tensor)
    if output.numel() != ranks * tensor.numel():
        raise ValueError(
            f"{what}: the output has {output.numel()} elements (shape {tuple(output.shape)}), but "
            f"{ranks} ranks with {tensor.numel()} each (shape {tuple(tensor.shape)}) give "
            f"{ranks * tensor.numel()}"
        )


def scattered(what: str, output: torch.Tensor, tensor: torch.Tensor, ranks: int) -> None:
    """Check that an input has one part for each rank, of the size of the output."""
    _same_dtype(what, output, tensor)
    if tensor.numel() != ranks * output.numel():
        raise ValueError(
            f"{what}: the input has {tensor.numel()} elements (shape {tuple(tensor.shape)}), but "
            f"{ranks} outputs with {output.numel()} each (shape {tuple(output.shape)}) need "
            f"{ranks * output.numel()}"
        )


def one_for_each_rank(what: str, tensors: Sequence[object], ranks: int, noun: str) -> None:
    """Check that a list has a tensor for each rank."""
    if len(tensors) != ranks:
        raise ValueError(f"{what}: {len(tensors)} {noun} for {ranks} ranks: give one for each")


def own_part(what: str, output: torch.Tensor, tensor: torch.Tensor, rank: int) -> None:
    """Check that the input of this rank fits into its place in the outputs."""
    _same_dtype(what, output, tensor)
    if output.numel() != tensor.numel():
        raise ValueError(
            f"{what}: this rank gives {tensor.numel()} elements (shape {tuple(tensor.shape)}), and "
            f"its place in the outputs, number {rank}, has {output.numel()} (shape "
            f"{tuple(output.shape)})"
        )


def rows_of(what: str, tensor: torch.Tensor, splits: Sequence[int], ranks: int, noun: str) -> None:
    """Check the splits of one side of an alltoall."""
    if not tensor.dim():
        raise ValueError(
            f"{what}: the {noun} has no dimensions, and so no rows: give tensor.reshape(1)"
        )
    if not splits:
        if tensor.shape[0] % ranks:
            raise ValueError(
                f"{what}: without {noun} splits the first dimension must be divisible by the "
                f"number of ranks; {tensor.shape[0]} rows for {ranks} ranks"
            )
        return
    if len(splits) != ranks:
        raise ValueError(f"{what}: {len(splits)} {noun} splits for {ranks} ranks")
    if any(split < 0 for split in splits):
        raise ValueError(f"{what}: {noun} splits must not be negative: {list(splits)}")
    if sum(splits) != tensor.shape[0]:
        raise ValueError(
            f"{what}: the {noun} splits {list(splits)} sum to {sum(splits)}, but the {noun} has "
            f"the shape {tuple(tensor.shape)}"
        )


def rank_in(what: str, rank: int, ranks: int) -> None:
    """Check the number of a root or a peer."""
    if not 0 <= rank < ranks:
        raise ValueError(f"{what}: there is no rank {rank} in a group of {ranks}")


def _same_dtype(what: str, output: torch.Tensor, tensor: torch.Tensor) -> None:
    if output.dtype != tensor.dtype:
        raise ValueError(f"{what}: the output is {output.dtype}, the input {tensor.dtype}")
