"""Makes docs/images/live.svg of a real job by hvdlite-top: python docs/make_live_picture.py

The job has four ranks, one of which is slowed down by a busy loop in its forward pass. Needs
PyTorch and rich.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from hvdlite.launcher.live.snapshot import Snapshot
from hvdlite.launcher.live.table import lines_of
from hvdlite.launcher.live.viewer import Viewer
from hvdlite.launcher.processes.event_loop import EventLoop
from hvdlite.launcher.top.cli import running_jobs

PICTURE = Path(__file__).parent / "images" / "live.svg"
COLUMNS, LINES = 118, 40
SLOW_RANK = 2
TRAINING = f"""
import time

import torch

import hvdlite.torch as hvd


class Layer(torch.nn.Linear):
    def forward(self, batch):
        end = time.monotonic() + 0.03
        while hvd.rank() == {SLOW_RANK} and time.monotonic() < end:
            pass
        return super().forward(batch)


hvd.init()
torch.set_num_threads(1)
model = Layer(512, 512)
plain = torch.optim.SGD(model.parameters(), lr=1e-3)
optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
batch = torch.ones(64, 512)
hvd.progress(10_000)
while True:
    time.sleep(0.02)
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
"""
FONT = re.compile(r"@font-face \{.*?\}", re.DOTALL)  # From other servers, which no page may need.


def look(folder: Path) -> tuple[Snapshot, Viewer]:
    """Return the job once its slow rank was named, and the stack of that rank as it is shown."""
    script = folder / "train.py"
    script.write_text(TRAINING)
    process = subprocess.Popen(
        [sys.executable, "-m", "hvdlite.launcher", "-np", "4", "python", "train.py"], cwd=folder
    )
    loop = EventLoop()
    try:
        time.sleep(3.0)
        connection = next(c for c, about in running_jobs(loop)[0] if about["pid"] == process.pid)
        viewer = Viewer(connection.ask, lambda: None, lambda: None)
        end = loop.now() + 60
        while loop.now() < end:
            viewer.job = connection.ask_now(["look"])
            if any(event["kind"] == "straggler" for event in viewer.job["events"]):
                break
            loop.run_once(0.5)
        viewer.press(str(SLOW_RANK))
        while not any("forward" in line for line in viewer.panel) and loop.now() < end:
            viewer.press("s")
            loop.run_once(0.2)
        return connection.ask_now(["look"]), viewer
    finally:
        process.terminate()
        process.wait()
        loop.close()


def main() -> None:
    """Make the picture."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        job, viewer = look(Path(folder))
    job["job"]["pid"] = 4711  # The same each time that the picture is made.
    panel = [line.replace(folder, "/home/me").replace(sys.prefix, "/env") for line in viewer.panel]
    lines = lines_of(
        job, COLUMNS, LINES, share=1.0, chosen=viewer.chosen, title=True,
        panel=[*panel, viewer.help],
    )  # fmt: skip
    console = Console(record=True, width=COLUMNS - 1, file=io.StringIO())
    for line in lines:
        console.print(Text.from_ansi(line), no_wrap=True, overflow="ellipsis")
    svg = console.export_svg(title="hvdlite-top", unique_id="live")
    PICTURE.write_text(FONT.sub("", svg))
    print(f"{PICTURE}: {PICTURE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
