"""What seeds have found in the parameter server, as the programs to which they were cut down."""

from __future__ import annotations

import pytest

from tests.simulation.ps.job import play_ps
from tests.simulation.ps.programs import Blow, PsProgram
from tests.simulation.start.programs import Visitor

FOUND = {
    # A worker had heard of a step at one server before a load undid it, and said so to that server
    # when it came again, so that a push was not counted there.
    "a server comes again after a load of which a worker that starts has not heard": PsProgram(
        2042432, 2, 3, "async", None, 2, every=1, back=(0, 1),
        blows=(
            Blow(0.3238780890932653, "kill", "server 1", "scheduler", 0.006180501292145514),
            Blow(0.0, "cut", "worker 2", "server 0", 0.053816629212462365, 3, "push"),
            Blow(0.0, "kill", "worker 2", seconds=0.01818252018751656, sends=3, of="push"),
        ),
    ),
    # A server that had lost all took the number of its updates for the steps of workers of ssp.
    "updates are taken for steps": PsProgram(
        620, 2, 2, "ssp", 0, 4, latency=1e-4, pause=0.3,
        blows=(Blow(1.0160711657858958, "kill", "server 0", seconds=0.007496492870377415),),
    ),
    # It offered its values to nobody but a worker that had left, and called its table lost.
    "the last worker leaves a server that returns": PsProgram(
        1112, 2, 1, "async", None, 6, latency=5e-3,
        blows=(
            Blow(0.2659924262812143, "kill", "server 1", seconds=0.008213859106010423),
            Blow(0.05686909040417048, "kill", "worker 0", seconds=0.007992228446791483),
        ),
    ),
    # It began with newer values than its snapshot, and let a worker make steps that these have.
    "newer values than those of a snapshot": PsProgram(
        1488, 2, 2, "sync", None, 6, every=3, latency=1e-5, pause=0.3,
        blows=(
            Blow(0.8894974699776074, "crash", "worker 0", seconds=0.006837172648253376),
            Blow(0.8926821516053322, "crash", "server 0", seconds=0.050592402651927354),
            Blow(0.3800646270407142, "crash", "server 0", seconds=0.2492585016411729),
        ),
    ),
    # A worker that returned pushed steps under other numbers to each server, and ssp waited.
    "a worker returns to a server that has lost its steps": PsProgram(
        1816, 2, 2, "ssp", 2, 4, latency=5e-3, pause=1e-3,
        blows=(
            Blow(0.2741941302300711, "kill", "server 0", seconds=0.006095456599128812),
            Blow(0.32508789753099865, "kill", "worker 0", seconds=0.005740352125738653),
        ),
    ),
    # A scheduler whose disk was full told members what it had forgotten when it came again.
    "what is told is not written down": PsProgram(
        2245, 2, 3, "sync", None, 3, every=1, momentum=True, latency=5e-3,
        blows=(
            Blow(0.04020285978195272, "slow", "scheduler", seconds=1.5628232741109978),
            Blow(0.02088886301747845, "fill", "scheduler", seconds=0.07927797595175222),
            Blow(0.046661957884136365, "kill", "scheduler", seconds=0.0010771768244306134),
            Blow(0.05535464614429274, "kill", "worker 2", seconds=0.05470086012460984),
        ),
    ),
    # What was loaded was not on disk yet when workers heard of it.
    "a server is lost after a load": PsProgram(
        2055, 2, 2, "sync", None, 3, every=3, blows=(Blow(0.0, "crash", "server 1", sends=10),),
        follows=PsProgram(2055, 3, 2, "sync", None, 2, saves=(2,)),
    ),
    # A server that began with its snapshot, and went on, had none of its values for a worker that
    # was to begin with them, since another server was behind.
    "a worker returns to a version that was restored": PsProgram(
        1997, 2, 1, "sync", None, 4, every=1, latency=1e-05, pause=0.3,
        blows=(
            Blow(0.778892618944273, "crash", "server 0", seconds=0.14283107657472321),
            Blow(0.8516905118160822, "kill", "server 1", seconds=0.019481733786733794),
            Blow(0.9497897249437023, "kill", "worker 0", seconds=0.009740866893366897),
            Blow(0.05555292607657209, "join", "server 3", seconds=0.5),
            Blow(0.06117991736416267, "kill", "server 3", seconds=0.42179702853942),
        ),
    ),
    # A server lost a step when it had just got its parts from others: all made that step again, and
    # the servers that had it let it count twice.
    "a step is lost after a move": PsProgram(
        7017046, 2, 2, "sync", None, 2, latency=0.0001, pause=0.3,
        blows=(
            Blow(0.3078240461522201, "crash", "server 0", seconds=0.008174491273785136),
            Blow(0.21790480383222452, "join", "server 4", seconds=0.25),
        ),
    ),
    # The same, and then the server that had that step was lost: workers that had gone back took its
    # clock for that of others, and went on from another step there.
    "a step is lost, and then the server that had it": PsProgram(
        7017046, 2, 2, "sync", None, 2, latency=0.0001, pause=0.3,
        blows=(
            Blow(0.3078240461522201, "crash", "server 0", seconds=0.008174491273785136),
            Blow(0.3474495739685059, "kill", "server 1", seconds=0.06349760567667309),
            Blow(0.21790480383222452, "join", "server 4", seconds=0.25),
        ),
    ),
    # The clock on the wall had gone back when a scheduler came again, which gave a save an older
    # number than that of the last one.
    "a save by a clock that went back": PsProgram(
        5011088, 3, 2, "async", None, 3, every=1, latency=0.005, pause=0.001,
        blows=(
            Blow(0.5990589439750813, "kill", "scheduler", seconds=0.04606996108011622),
            Blow(0.18185041732025317, "jump", "scheduler", seconds=-902.8404790047441),
        ),
        scales=((1, 3),), saves=(2, 3),
    ),
    # The push of a worker that was lost was lost with a server, too: its successor makes it again.
    "a push is lost with both of its ends": PsProgram(
        114014445, 3, 2, "sync", None, 1, every=1, latency=0.005,
        blows=(
            Blow(0.2065743332949478, "kill", "worker 1", seconds=0.004814774437939826),
            Blow(0.26277693892550097, "kill", "server 0", seconds=0.004814774437939826),
            Blow(0.1732867330586988, "kill", "server 2", seconds=0.00972460692997644),
        ),
    ),
    # Servers came between two tables that make the same steps: one of them had moved with a step
    # for which a worker that came again needed the values of before.
    "a worker returns between two tables after a move": PsProgram(
        1343, 2, 2, "sync", None, 6, every=1, latency=1e-5, bytes_per_second=1e7,
        blows=(
            Blow(0.0, "kill", "worker 0", seconds=0.007204419184368276, sends=121),
            Blow(0.424810364334798, "join", "server 2", seconds=0.0078125),
        ),
        saves=(0, 2), back=(0, 2), rows=True,
    ),
    # One table went back to a snapshot, and waited for a worker that waited for the other one.
    "a table goes back without a worker that has nothing to ask of it": PsProgram(
        4062617, 2, 3, "sync", None, 5, every=3, latency=1e-4, pause=0.3, bytes_per_second=1e6,
        blows=(Blow(1.424948467792547, "kill", "server 1", seconds=0.3146318703787327),),
        rows=True,
    ),
    # A worker that had come again pushed to one of two tables that both had lost steps.
    "a worker without a step hears of a rollback": PsProgram(
        8062629, 2, 2, "sync", None, 3, every=3, latency=5e-3, bytes_per_second=1e6,
        blows=(
            Blow(1.424948467792547, "kill", "server 1", seconds=0.009832245949335397),
            Blow(0.7154625007781436, "kill", "worker 0", seconds=0.7043960112355626),
        ),
        scales=((2, 2),), rows=True,
    ),
    # What a worker makes again was forgotten when servers came.
    "a worker makes a step again after a move": PsProgram(
        8000265, 1, 2, "ssp", 0, 1, every=3, latency=1e-4,
        blows=(
            Blow(0.4604220102676557, "crash", "server 0", seconds=0.007251275056943346),
            Blow(0.1709027542245597, "join", "server 1", seconds=0.0078125),
            Blow(0.0, "kill", "worker 1", seconds=0.13594891955473665, sends=2, of="push_rows"),
        ),
        rows=True,
    ),
    # The only worker was lost between the pushes to two tables each time, and servers came.
    "a worker is lost between two tables, and servers come": PsProgram(
        5, 1, 1, "sync", None, 4, every=1, latency=1e-4, pause=1e-2, rows=True,
        blows=(
            Blow(0.0, "cut", "worker 0", "server 0", 0.05, 2, "push_rows"),
            Blow(0.0, "kill", "worker 0", seconds=0.7, sends=2, of="push_rows"),
            Blow(0.1, "join", "server 1"),
            Blow(0.0, "cut", "worker 0", "server 0", 0.05, 3, "push_rows"),
            Blow(0.0, "cut", "worker 0", "server 1", 0.05, 3, "push_rows"),
            Blow(0.0, "kill", "worker 0", seconds=0.2, sends=3, of="push_rows"),
        ),
    ),
    # Servers had answered a pull with two versions when others came: what a server that was lost
    # was offered then was of both.
    "servers come between two answers to a pull": PsProgram(
        5, 2, 1, "sync", None, 5, part_bytes=16, latency=1e-4, pause=0.1,
        blows=(
            Blow(0.121, "stall", "server 1", "worker 0", 2.0), Blow(0.06, "join", "server 2"),
            Blow(0.23, "kill", "server 2", seconds=0.1),
        ),
    ),
    # A save and a load waited for steps that no server had any more.
    "a server loses steps amid a save": PsProgram(
        5, 1, 2, "sync", None, 7, every=3, latency=1e-4, pause=1e-2, saves=(5,), rows=True,
        blows=(Blow(0.0, "kill", "worker 0", "server 0", 0.1, 1, "save"),),
    ),
    "a server loses steps amid a load": PsProgram(
        5, 1, 1, "sync", None, 7, every=3, latency=1e-4, pause=1e-2, back=(1, 5), rows=True,
        blows=(Blow(0.0, "kill", "worker 0", "server 0", 0.1, 1, "load"),),
    ),
    # All had said where they stand, and the worker counted from there what it had gone back from.
    "a server loses steps as a load comes to count": PsProgram(
        1102124, 2, 1, "sync", None, 2, every=3, part_bytes=24, latency=1e-4, back=(1, 2),
        rows=True,
        blows=(
            Blow(0.4749092331612532, "kill", "server 1", seconds=0.007370388096659466),
            Blow(0.4752818014898619, "stop", "server 0", seconds=0.007370388096659466),
            Blow(1e-5, "stop", "worker 0", "server 0", 0.5181723625624524, 2, "turn"),
        ),
    ),
    # A worker that had been silent for long came again with a push that had been counted.
    "a worker is forgotten between its push and its pull": PsProgram(
        5, 1, 2, "async", None, 4, latency=1e-4, pause=1e-3,
        blows=(Blow(0.0, "stop", "worker 1", seconds=25.0, sends=1, of="push"),),
    ),
    # A worker heard first that a server was no more, and then waited for its answer for ever.
    "a server leaves amid a save": PsProgram(
        5037392, 2, 1, "async", None, 2, every=1, latency=1e-5,
        blows=(
            Blow(0.552283503611682, "kill", "scheduler", "worker 0", 0.8597170745430021),
            Blow(0.0, "stop", "worker 0", seconds=1.6210504204453993, sends=26),
            Blow(0.2121441343089495, "join", "server 2", seconds=0.0078125),
            Blow(0.4006321900750173, "join", "server 3", seconds=0.0078125),
        ),
        scales=((1, 1),), saves=(2,), proves=True,
        visitors=(Visitor(0.1981621658567223, "worker", 5, 8.0),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_mended(name: str) -> None:
    assert play_ps(FOUND[name]).broken is None


def test_a_server_that_was_told_to_go_and_comes_again_goes() -> None:
    """It had joined, and says so each time; it kept its parts until the end of the job."""
    steps = 40
    program = PsProgram(
        5, 1, 1, "sync", None, steps, every=1, latency=1e-4, pause=0.3, scales=((14, 1),),
        blows=(
            Blow(0.06, "join", "server 1"),
            Blow(0.0, "kill", "worker 0", "server 1", 0.1, 1, "scale"),
        ),
    )  # fmt: skip
    job = play_ps(program)
    assert job.broken is None
    pushes = [line for line in job.world.story() if " push t " in line and "-> server 1" in line]
    assert 0 < len(pushes) < steps // 2
