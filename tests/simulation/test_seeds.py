"""Jobs whose events come in the orders of many seeds."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.elastic.programs import ElasticProgram, Happening, make_elastic_program
from tests.simulation.known_bugs import ELASTIC_BUGS
from tests.simulation.ps.programs import Blow, PsProgram, make_ps_program
from tests.simulation.ranks.programs import make_program
from tests.simulation.shrinking import KINDS
from tests.simulation.soak import play, read, soak

# Seeds in the suite, and of one test; a soak plays more of them.
SHARES, GROUP = {"ranks": 150, "elastic": 250, "ps": 50}, 50
TRACED = (*range(6), 144, 155)  # With starts, in which somebody comes who is no rank.


def digest() -> str:
    jobs = (kind.play(kind.make(seed)) for kind in KINDS.values() for seed in TRACED)
    stories = [line for job in jobs for line in job.world.story()]
    return hashlib.sha256("\n".join(stories).encode()).hexdigest()


@pytest.mark.parametrize(
    ("name", "first"),
    [(name, first) for name, share in SHARES.items() for first in range(0, share, GROUP)],
)
def test_invariants_hold(name: str, first: int) -> None:
    assert not play(name, KINDS[name], range(first, first + GROUP)).broken


def test_a_seed_gives_the_same_trace_in_any_process() -> None:
    """Hash seeds order sets of strings, and the machine's clock orders threads: neither counts."""
    program = "from tests.simulation.test_seeds import digest; print(digest())"
    digests = {digest()}
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout.strip())
    assert len(digests) == 1


# What seeds beyond the share of the suite have found: the kind of job, its program, what it was.
FOUND: list[tuple[str, Any]] = [
    # A leader that had departed was not told why the job failed.
    ("ranks", make_program(3221, calm=True)),
    # Who had lost the data of a rank that fled blamed it, though the parent of both had died.
    ("ranks", make_program(6063, calm=True)),
    ("ranks", make_program(8099, calm=True)),  # The same, with the way up lost by two hosts.
    # All ranks with the last commit were on hosts that left, and one of them was not enough ranks
    # for a world with those that came: it waited for ever.
    ("elastic", make_elastic_program(37589, calm=True)),
    # A rank was lost on the way to the check that all had agreed on, and its peer began a world
    # with an older commit than ranks had that were to leave.
    ("elastic", make_elastic_program(39838, calm=True)),
    # A worker was started in the slot of one that its agent had yet to end, after a cut that was
    # as long as the silence that counts as a loss,
    ("elastic", ElasticProgram(
        2000649, (("b", 1), ("d", 1)), admit="wait", steps=20, step_seconds=0.3, commit_every=1,
        happenings=(
            Happening(1.4907899066969656, "stall", 2, "d", (), 1.4837665491594487, 3, "b"),
        ),
    )),
    # and where a host was used again before the agent that had been told to end had ended.
    ("elastic", ElasticProgram(
        2000588, (("a", 3),), failures_by_host=True, steps=1, step_seconds=0.001, commit_every=1,
        happenings=(
            Happening(0.32858342276770147, "kill", 4),
            Happening(0.7241314580067743, "jump", seconds=1.4980857541219588),
        ),
    )),
    # A worker that was stopped before it had connected was waited for for ever.
    ("elastic", ElasticProgram(
        35, (("c", 1),), steps=2, step_seconds=0.3, commit_every=1,
        happenings=(Happening(0.4911215662587655, "stop"),),
    )),
    # A host was used again at once that was lost while discovery did not show it.
    ("elastic", ElasticProgram(
        2001358, (("b", 1),), steps=100, step_seconds=0.001, commit_every=1,
        happenings=(
            Happening(1.923039963111683, "stall", host="b", seconds=1.145292351452337, way=1),
            Happening(2.481318704761551, "show", hosts=(("a", 2), ("c", 3))),
            Happening(2.976660033256457, "show", hosts=(("a", 2), ("b", 1), ("c", 3))),
        ),
    )),
    # An agent was killed when its host could not be reached, and its folder stayed there.
    ("elastic", ElasticProgram(
        450, (("a", 1),), steps=1, step_seconds=0.001, commit_every=1,
        happenings=(
            Happening(0.3735694031123953, "stall", host="a", seconds=0.276, way=2),
            Happening(0.482687, "fell", host="a"),
        ),
    )),
    # A scheduler that was lost forgot whose turn it was to load, and servers did not answer that
    # worker any more.
    ("ps", make_ps_program(14941, calm=True)),
    # A server that had come again had its newest snapshot, and gave it to a worker that had to make
    # the step before that again, where another server had lost more.
    ("ps", make_ps_program(13175, calm=True)),
    ("ps", make_ps_program(15012, calm=True)),
    # The beginning of a snapshot for which a disk had no room stayed on it.
    ("ps", PsProgram(
        1000340, mode="ssp", staleness=0, steps=3, every=3, part_bytes=16, pause=0.3,
        blows=(Blow(0.35393909146207664, "fill", "server 0", seconds=1.714685953968538),),
    )),
    # A server that had just got a table from others made an update of it that nobody had pulled
    # before, and gave its result to a worker that had to make that step again.
    ("ps", PsProgram(
        8004574, servers=1, workers=2, steps=2, part_bytes=24, bytes_per_second=1e6, pause=0.3,
        blows=(
            Blow(0.0, "kill", "worker 1", seconds=0.009611916737833102, sends=19),
            Blow(0.10288258920752164, "join", "server 1", seconds=0.0078125),
        ),
    )),
    # A worker had to make its last step again for one server, for which another one went back to a
    # snapshot and waited until all workers had started there; the others had no need to.
    ("ps", PsProgram(
        1017620, servers=2, workers=2, steps=1, every=1, part_bytes=4096, latency=1e-05,
        bytes_per_second=1e6,
        blows=(
            Blow(0.3403687772371176, "crash", "worker 0", seconds=0.007612994071226454),
            Blow(0.4341811443669078, "kill", "server 0", seconds=0.1829769967668129),
        ),
    )),
    # A host that failed at each of its starts was tried for ever: each time it was used again, the
    # time for which slots may be missing began anew.
    ("elastic", make_elastic_program(12485)),
    # A host was lost and came back; its next agent had not said hello when the job ended, and the
    # folder of the one before stayed there.
    ("elastic", make_elastic_program(18464)),
    # A host had no device for a worker that was no longer wanted when it said so, and that slot was
    # used again.
    ("elastic", ElasticProgram(
        7026060, (("b", 2),), steps=1, commit_every=3, bytes_per_second=1e5,
        happenings=(
            Happening(0.1797261716021166, "show", hosts=(("a", 1), ("b", 1), ("e", 1))),
            Happening(0.533004129648346, "show", hosts=(("a", 2), ("b", 3), ("c", 1), ("d", 2))),
        ),
        devices=(("a", 1), ("b", 1), ("c", 2)),
    )),
    # A rank that had to leave, and had the last commit, came between the ranks of another host, and
    # changed places with one of them when its own host was shown again.
    ("elastic", ElasticProgram(
        3024577, (("a", 1), ("c", 1), ("d", 2)), min_np=3, steps=6, step_seconds=0.001,
        commit_every=1,
        happenings=(
            Happening(2.1040715937200063, "raise", host="d"),
            Happening(2.1053152393206216, "show", which=3, host="e", hosts=(("a", 2),)),
        ),
    )),
    # Nothing came from a host, and then nothing went there, either: it was used again before its
    # agent, which had heard the launcher until that gave it up, had ended its workers.
    ("elastic", ElasticProgram(
        28603, (("b", 1),), steps=1,
        happenings=(
            Happening(0.3159225203753452, "stall", host="b", seconds=1.166, way=1),
            Happening(0.9990780282898476, "stall", host="b", seconds=1.681, way=3),
        ),
    )),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(FOUND)))
def test_what_was_found_stays_mended(number: int) -> None:
    name, program = FOUND[number]
    assert KINDS[name].play(program).broken is None


def test_a_soak_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    file = tmp_path / "seeds.tsv"
    for part in (0, 0, 1):
        soak(file, ["ranks", "elastic"], 0.0, batch=2, part=part, parts=2)
    played = [(each.world, each.first, each.end, each.broken) for each in read(file)]
    assert played == [("ranks", 0, 2, ()), ("ranks", 4, 6, ()), ("ranks", 2, 4, ())]
    with ELASTIC_BUGS["a worker starts where another one has not ended"]():
        assert soak(file, ["elastic"], 0.0, batch=15) == 1
    assert 13 in read(file)[-1].broken
