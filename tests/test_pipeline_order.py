"""No order of messages in which a pipeline waits for ever: on gloo, and as NCCL runs them, in streams.

`played` simulates stream-ordered messages. Each rank has a stream that computes and one for each of its groups. The
host puts work into them without waiting. A message begins when it is the first of its stream and what was computed
before the host asked for it is done; a send and its receive end together, once both have begun. What the host puts
where comes from the pipeline's own code: `Pipeline.step` runs here on stand-ins for torch.distributed's calls.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
from speeds import besides
from test_pipelines import rank_here, small

from labs.common.pipelines import engine, even_cuts, schedules
from labs.kit.launch import run_on_ranks
from labs.kit.rank import Rank

CPU = torch.device("cpu")


class Streams:
    """torch.distributed as one rank sees it: notes what the host would put into which stream."""

    ProcessGroup, Work = object, object

    def __init__(self, rank: int, stages: int, shapes: list) -> None:
        self.rank, self.stages, self.shapes = rank, stages, shapes
        self.queues: dict[str, list[tuple]] = {"compute": []}

    def get_rank(self):
        return self.rank

    def get_world_size(self):
        return self.stages

    def get_backend_config(self, group=None):
        return "gloo"

    def new_group(self, ranks):
        self.made = getattr(self, "made", 0) + 1
        return f"group {self.made}"

    def broadcast_object_list(self, out, src):
        out[0] = self.shapes[src]

    def _put(self, kind, peer, group):
        after = len(self.queues["compute"])  # NCCL's stream waits for what was computed when it was asked
        queue = self.queues.setdefault(group, [])
        queue.append((kind, peer, after))
        place = (group, len(queue))
        wait = lambda *limit: self.queues["compute"].append(("wait", *place))  # noqa: E731
        return SimpleNamespace(wait=wait, is_completed=lambda: False)

    def isend(self, tensor, to, group):
        return self._put("send", to, group)

    def irecv(self, buffer, source, group):
        return self._put("receive", source, group)

    def send(self, tensor, to, group):
        self.isend(tensor, to, group).wait()

    def recv(self, buffer, source, group):
        self.irecv(buffer, source, group).wait()


def programs(monkeypatch, schedule, stages, m, shared=()):
    """What each rank's host puts into its streams in a step. `shared`: the groups that become one, as (stage, way)."""
    model = small(stages)
    shapes = [((8,), torch.float32)] * stages
    found = []
    for r in range(stages):
        fake = Streams(r, stages, shapes)
        monkeypatch.setattr(engine, "dist", fake)
        links = engine.new_links()
        links = {k: "one" if shared and k[1] in shared else group for k, group in links.items()}
        rank = Rank(r, stages, r, stages, CPU, "gloo", ())
        pipeline = engine.Pipeline(model, even_cuts(model, stages), rank, links=links)
        x = torch.zeros(m, 8)
        pipeline.step(schedule(r, stages, m), x.chunk(m), x.chunk(m))
        found.append(fake.queues)
    return found


def played(queues: list[dict[str, list[tuple]]]) -> bool:
    """Whether all that the hosts have put into their streams comes to its end."""
    at = [dict.fromkeys(q, 0) for q in queues]  # how many of each stream are done

    def ready(r, group):
        done, queue = at[r][group], queues[r][group]
        return done < len(queue) and queue[done][2] <= at[r]["compute"] and queue[done]

    moved = True
    while moved:
        moved = False
        for r, streams in enumerate(queues):
            compute = streams["compute"]
            while (i := at[r]["compute"]) < len(compute) and at[r][compute[i][1]] >= compute[i][2]:
                at[r]["compute"] += 1
                moved = True
            for group in streams.keys() - {"compute"}:
                mine = ready(r, group)
                if mine and mine[0] == "send" and group in queues[mine[1]]:
                    theirs = ready(mine[1], group)
                    if theirs and theirs[:2] == ("receive", r):
                        at[r][group] += 1
                        at[mine[1]][group] += 1
                        moved = True
    return all(at[r][name] == len(queue) for r, q in enumerate(queues) for name, queue in q.items())


SCHEDULES = {"naive": schedules.gpipe, **schedules.SCHEDULES}


@pytest.mark.parametrize("name", SCHEDULES)
def test_in_streams_every_schedule_ends(monkeypatch, name):
    for stages, m in itertools.product(range(2, 9), (1,) if name == "naive" else (1, 2, 3, 4, 8, 16)):
        assert played(programs(monkeypatch, SCHEDULES[name], stages, m)), (name, stages, m)


def test_one_group_for_a_direction_of_all_links_waits_for_ever(monkeypatch):
    """What the simulation must find: receives that are posted ahead stand before the sends of 1F1B."""
    stuck = [
        (stages, m)
        for stages, m in itertools.product((2, 3, 4), (1, 2, 4, 8))
        if not played(programs(monkeypatch, schedules.one_f_one_b, stages, m, shared=("activation",)))
    ]
    assert stuck and all(stages > 2 for stages, _ in stuck)
    assert not played(programs(monkeypatch, schedules.one_f_one_b, 2, 4, shared=("activation", "gradient")))


def test_all_ranks_greet_in_one_order(monkeypatch):
    """NCCL connects at the first message, and the host waits for the other end: both must begin with the same one."""
    for stages in range(2, 9):
        queues = [q for q in programs(monkeypatch, schedules.gpipe, stages, 1)]
        for r, q in enumerate(queues[:-1]):
            common = [name for name in q if name in queues[r + 1]]
            assert [c for c in queues[r + 1] if c in common] == common and len(common) == 3  # "compute" and two links


def every_schedule():
    """Loss of the last stage and this rank's gradients, for each schedule and number of micro-batches."""
    rank, m = rank_here(), 8
    model = small(8)
    x, y = model.make_batch(16)
    links, found = engine.new_links(), []
    for schedule, parts in ((schedules.gpipe, 1), (schedules.gpipe, m), (schedules.one_f_one_b, m)):
        pipeline = engine.Pipeline(model, even_cuts(model, rank.world_size), rank, 20.0, links)
        pipeline.module.zero_grad()
        loss = pipeline.step(schedule(rank.rank, rank.world_size, parts), x.chunk(parts), y.chunk(parts))
        found.append((loss, [p.grad.clone() for p in pipeline.module.parameters()]))
    return found


@pytest.mark.parametrize("stages", besides((2, 5), range(2, 9)))
def test_on_gloo_every_schedule_ends_with_the_same_gradients(stages):
    by_rank = run_on_ranks(every_schedule, stages, timeout_s=60.0)
    losses = [loss for loss, _ in by_rank[-1]]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    for naive, *others in by_rank:
        for _, gradients in others:
            torch.testing.assert_close(gradients, naive[1], rtol=1e-4, atol=1e-6)


def test_the_clock_of_an_event_does_not_wait_for_receives_that_are_posted_ahead(monkeypatch):
    """Synchronising the device would: the receive waits for a neighbour that may wait for this stage."""
    waited = []
    stream = SimpleNamespace(synchronize=lambda: waited.append("stream"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: waited.append("device"))
    pipeline = SimpleNamespace(events=[], device=torch.device("cuda", 0))
    engine.Pipeline.now(pipeline)
    assert waited == ["stream"]


def test_on_nccl_a_message_is_waited_for_without_a_limit():
    """torch: a wait with a timeout blocks the host until the GPU has come so far (ProcessGroupNCCL.hpp, wait)."""
    asked = []
    work = SimpleNamespace(wait=lambda *limit: asked.append(limit))
    for place in ("cuda", "cpu"):
        box = SimpleNamespace(place=torch.device(place), pipeline=SimpleNamespace(wait_s=1.0, stage=0))
        engine.Mailbox._wait(box, work, "a message")
    assert asked[0] == () and len(asked[1]) == 1
