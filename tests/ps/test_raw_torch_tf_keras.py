"""Raw access with the tensors of each framework, to the same names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")
torch = pytest.importorskip("torch")

import hvdlite.jax.ps  # noqa: E402
import hvdlite.keras.ps  # noqa: E402
import hvdlite.numpy.ps  # noqa: E402
import hvdlite.tf.ps  # noqa: E402
import hvdlite.torch.ps  # noqa: E402
from hvdlite.ps import context  # noqa: E402
from hvdlite.ps.context import raw_updater  # noqa: E402
from tests.ps.cluster import NewCluster  # noqa: E402

# The module, what makes its tensors of arrays, and the class of what it returns.
FRAMEWORKS = {
    "numpy": (hvdlite.numpy.ps, np.asarray, np.ndarray),
    "torch": (hvdlite.torch.ps, torch.from_numpy, torch.Tensor),
    "tf": (hvdlite.tf.ps, tf.convert_to_tensor, tf.Tensor),
    "jax": (hvdlite.jax.ps, jax.numpy.asarray, jax.Array),
    "keras": (
        hvdlite.keras.ps, keras.ops.convert_to_tensor,
        type(keras.ops.convert_to_tensor(np.zeros(1))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_tensors_and_rows_are_pushed_and_pulled(
    new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ps, tensor, kind = FRAMEWORKS[name]
    cluster = new_cluster(2, 1, updater_of=raw_updater)
    held = context.Context(cluster.settings, cluster.worker("worker 0"))
    monkeypatch.setattr(context._Held, "context", held)

    def pulled(found: Any) -> Any:
        assert isinstance(found, kind)
        return np.asarray(found)

    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    ps.start("begun", tensor(array))
    ps.push("begun", tensor(np.full((2, 3), 0.5, np.float32)))
    found = pulled(ps.pull("begun"))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, array + 0.5)

    if name == "tf":
        slices = tf.IndexedSlices(tf.ones((1, 3)), tf.constant([1]), tf.constant([2, 3]))
        for call in (ps.push, ps.start):
            with pytest.raises(TypeError, match=r"'begun' is given as IndexedSlices.* push_rows"):
                call("begun", slices)
    ps.start_rows("rows", 10, 3, initializer="zeros")
    ps.push_rows("rows", tensor(np.array([7, 2, 7])), tensor(np.ones((3, 3), np.float32)))
    rows = pulled(ps.synchronize(ps.pull_rows_async("rows", tensor(np.array([2, 3, 7])))))
    np.testing.assert_array_equal(rows, [[1] * 3, [0] * 3, [2] * 3])
