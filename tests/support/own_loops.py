"""Training loops of users, under ``everstep.train.protect`` without a service: real gloo ranks of
this machine, with deaths at named places of a step."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from everstep.wire.events import EventKind
from storage.filesystem import open_storage
from storage.logs.journal import read_journal
from storage.run_dir import RunDir
from tests.support.rank_processes import run_to_end


@dataclass(frozen=True)
class LoopJob:
    """One start of a loop."""

    directory: Path
    run_id: str
    world_size: int = 2
    loop: str = "raw"
    steps: int = 40
    norm: bool = True
    """With BatchNorm and dropout, which depend on the world size."""
    killed: tuple[int, int, str] | None = None
    """(rank, steps done, place): that rank ends itself there with SIGKILL; in a sharded loop, at
    the first such place from there on."""
    by: int = signal.SIGKILL
    """The signal, of a sharded loop."""
    odd: tuple[int, int, str] | None = None
    """(rank, steps done, what): what that rank does once that its peers do not."""
    every_steps: int | None = 1000
    nodes: tuple[str, ...] = ()
    """Node of each rank; by default, all are on this machine's."""
    mates: tuple[int, ...] = ()
    """Ranks that die with the killed one."""
    replicas: int = 1
    """Groups of ranks of which each has a sharded model."""
    heirs: bool | int = True
    origin: str | None = None
    """Run whose newest checkpoint this one begins from."""
    plain: Path | None = None
    """Directory of torch.distributed.checkpoint from which a sharded loop begins; it is written if
    it does not exist."""

    @property
    def run_dir(self) -> RunDir:
        return RunDir(open_storage(str(self.directory / "storage")), self.run_id)


@dataclass
class Ended:
    """How one rank ended."""

    exit_code: int | None
    error: str | None = None
    weights: str | None = None
    values: dict[str, Any] = field(default_factory=dict)
    """The final weights."""


def start(job: LoopJob, meanwhile: Callable[[list[Any]], None] = lambda ranks: None) -> list[Ended]:
    """Run the loop on all ranks to its end, whatever that is. ``meanwhile`` gets the processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["train_fn.protect.door", "torch._dynamo", "tests.support.own_loops"]
    )
    base = job.directory / f"{job.run_id}-{time.monotonic_ns()}"
    base.mkdir(parents=True)
    ranks = [
        context.Process(target=_rank_main, args=(job, rank, str(base)))
        for rank in range(job.world_size)
    ]
    run_to_end(ranks, meanwhile)
    return [_ended(base / f"{rank}.pickle", ranks[rank].exitcode) for rank in range(job.world_size)]


def train_to_end(job: LoopJob) -> Ended:
    """Run a start that must succeed; rank 0's end."""
    ended = start(job)
    assert [(each.exit_code, each.error) for each in ended] == [(0, None)] * job.world_size
    assert len({each.weights for each in ended}) == 1
    return ended[0]


def events(job: LoopJob, kind: EventKind) -> list[dict[str, Any]]:
    """Data of the run's events, over all its starts."""
    found = []
    for submission in job.run_dir.submissions():
        cursor: str | None = None
        while True:
            batch, cursor = read_journal(job.run_dir, submission, cursor, 1000)
            found += [event.data for event in batch if event.kind is kind]
            if not batch:
                break
    return found


def losses(job: LoopJob) -> dict[int, float]:
    """Loss of every step; one that two starts report has one loss."""
    merged: dict[int, float] = {}
    for data in events(job, EventKind.METRICS):
        for point in data["points"]:
            loss = point["values"]["loss"]
            assert merged.setdefault(point["step"], loss) == loss, point["step"]
    return merged


def _ended(path: Path, exit_code: int | None) -> Ended:
    found: Ended = pickle.loads(path.read_bytes()) if path.is_file() else Ended(None)
    found.exit_code = exit_code
    return found


def on_node(name: str) -> None:
    """Let this process be on a node of its own."""
    found = os.uname()
    named = os.uname_result((found[0], name, *found[2:]))
    os.uname = lambda: named


def _rank_main(job: LoopJob, rank: int, base: str) -> None:
    import torch
    import torch.distributed as dist

    # As in torchrun's and Ray's: a loader process is a child of its rank, and dies with it.
    multiprocessing.set_start_method("fork", force=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if job.nodes:
        on_node(job.nodes[rank])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if job.world_size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{base}/rendezvous", rank=rank, world_size=job.world_size
        )
    ended = Ended(None)
    try:
        loops: dict[str, Callable[[LoopJob, int], Any]] = {
            "raw": raw,
            "evaluated": evaluated,
            "folds": folds,
            "gan": gan,
            "own": own_data,
            "sharded": sharded,
            "unlike": unlike,
        }
        model = loops[job.loop](job, rank)
        data = [value.detach().numpy().tobytes() for value in model.state_dict().values()]
        ended.weights = hashlib.sha256(b"".join(data)).hexdigest()
        ended.values = {name: value.numpy() for name, value in model.state_dict().items()}
    except Exception as exc:
        ended.error = f"{type(exc).__name__}: {exc}"
    Path(base, f"{rank}.pickle").write_bytes(pickle.dumps(ended))
    if dist.is_initialized():
        dist.destroy_process_group()


def die(job: LoopJob, rank: int, step: int, place: str) -> None:
    if job.killed == (rank, step, place):
        os.kill(os.getpid(), signal.SIGKILL)


def protect(job: LoopJob, **parts: Any) -> Any:
    import everstep.train as es
    from everstep.spec.sections import ResumeFrom
    from train_fn.protect import training

    if job.origin is not None:  # as the spec of a service's run says it
        of_run, chosen = training._spec, ResumeFrom(run_id=job.origin, step="latest")
        training._spec = lambda *given: of_run(*given).model_copy(update={"resume_from": chosen})
    return es.protect(
        **parts,
        storage=str(job.directory / "storage"),
        run_id=job.run_id,
        checkpoint={"every_steps": job.every_steps},
    )


def wrapped(model: Any, job: LoopJob) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model) if job.world_size > 1 else model


def raw(job: LoopJob, rank: int) -> Any:
    """An ordinary loop with everything that has state or randomness: 200 samples in global batches
    of 24, so that the last one of an epoch has 8."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    import everstep.train as es

    torch.manual_seed(3)
    extra = [nn.BatchNorm1d(16), nn.Dropout(0.2)] if job.norm else []
    bare = nn.Sequential(nn.Linear(8, 16), *extra, nn.ReLU(), nn.Linear(16, 4))
    model = wrapped(bare, job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [10, 25], 0.5)
    averaged = torch.optim.swa_utils.AveragedModel(bare)
    state = protect(
        job, model=model, optimizer=optimizer, scheduler=scheduler, extra={"ema": averaged}
    )
    data = es.loader(Noisy(), global_batch_size=24, seed=5)
    with state:
        for x, y in data.batches(state, steps=job.steps):
            step = state.step_number
            loss = F.cross_entropy(model(x), y) * data.weight
            die(job, rank, step, "forward")
            loss.backward()
            die(job, rank, step, "backward")
            optimizer.step()
            die(job, rank, step, "torn")
            scheduler.step()
            averaged.update_parameters(bare)
            optimizer.zero_grad()
            if job.odd == (rank, step, "stop"):
                os.kill(os.getpid(), signal.SIGTERM)
            state.step(loss=loss)
            die(job, rank, step, "committed")
    return nn.ModuleDict({"model": bare, "ema": averaged})


def evaluated(job: LoopJob, rank: int) -> Any:
    """Rank 0 alone evaluates at the end of each epoch, and notes it."""
    import torch
    from torch import nn
    from torch.utils.data import BatchSampler, DistributedSampler

    import everstep.train as es

    torch.manual_seed(3)
    bare = nn.Linear(8, 4)
    model = wrapped(bare, job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data: Any = es.loader(Noisy(), global_batch_size=24)
    if job.norm:
        sampler: Any = DistributedSampler(Noisy(), job.world_size, rank)
        data = es.loader(Noisy(), batch_sampler=BatchSampler(sampler, 24, drop_last=False))
    state = protect(job, model=model, optimizer=optimizer, extra={"data": data} if job.norm else {})
    with state:
        for epoch in range(data.epoch if job.norm else state.epoch, 4):
            for x, _ in data.batches(state, epochs=epoch + 1):
                loss = model(x).square().mean() * (1 if job.norm else data.weight)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                state.step(loss=loss)
            if rank == 0:
                die(job, rank, epoch, "evaluation")
                with (job.directory / f"{job.run_id}.evaluated").open("a") as notes:
                    notes.write(f"{epoch} {bare.weight.sum():.9f}\n")
    return bare


def folds(job: LoopJob, rank: int) -> Any:
    """Three trainings one after the other, with one seed for all of them."""
    import torch
    from torch import nn

    import everstep.train as es

    torch.manual_seed(3)
    models = nn.ModuleList()
    for fold in range(3):
        bare = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 4))
        models.append(bare)
        model = wrapped(bare, job)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        state = protect(job, model=model, optimizer=optimizer)
        data = es.loader(Noisy(), global_batch_size=24, seed=fold)
        with state:
            for x, _ in data.batches(state, epochs=2):
                die(job, rank, state.step_number, f"fold {fold}")
                loss = model(x).square().mean() * data.weight
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                state.step(loss=loss)
    return models


def gan(job: LoopJob, rank: int) -> Any:
    """Two optimizers, with a collective between their steps."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    import everstep.train as es

    torch.manual_seed(4)
    generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    g, c = wrapped(generator, job), wrapped(critic, job)
    of_g = torch.optim.Adam(g.parameters(), 1e-3)
    of_c = torch.optim.Adam(c.parameters(), 1e-3)
    state = protect(job, model={"g": g, "c": c}, optimizer={"g": of_g, "c": of_c}, torn="shadow")
    data = es.loader(Noisy(), global_batch_size=24, seed=5)
    with state:
        for real, _ in data.batches(state, steps=job.steps):
            step = state.step_number
            fake = g(torch.randn(len(real), 4))
            of_c.zero_grad()
            loss = F.softplus(-c(real)).mean() + F.softplus(c(fake.detach())).mean()
            loss.backward()
            die(job, rank, step, "backward")
            of_c.step()
            die(job, rank, step, "between")
            of_g.zero_grad()
            critic.requires_grad_(False)
            F.softplus(-critic(fake)).mean().backward()
            of_g.step()
            critic.requires_grad_(True)
            die(job, rank, step, "torn")
            state.step(loss=loss)
    return nn.ModuleDict({"g": generator, "c": critic})


def mesh_of(job: LoopJob) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    sizes = (job.replicas, job.world_size // job.replicas)[-min(job.replicas, 2) :]
    names = ("replicate", "shard")[-len(sizes) :]
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def sharded(job: LoopJob, rank: int) -> Any:
    """A model that FSDP2 shards: some tensors have fewer rows than there are ranks, some are not
    divisible; gradients are clipped, and weights averaged."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    import everstep.train as es

    mesh = mesh_of(job)

    def built() -> Any:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 30), nn.LayerNorm(30), nn.Tanh(), nn.Linear(30, 4))
        for layer in (model[0], model[3], model):
            fully_shard(layer, mesh=mesh)
        return model

    model, averaged = built(), built().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [10, 25], 0.5)
    if job.plain is not None and job.plain.exists():
        load_plain(model, optimizer, job.plain)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state = protect(job, **parts, extra={"ema": averaged}, heirs=job.heirs)
    data = es.loader(Noisy(), global_batch_size=24, seed=5)
    pids: list[Any] = [None] * job.world_size
    dist.all_gather_object(pids, os.getpid())

    victim, from_step, where = job.killed or (None, 0, "")

    def die() -> None:
        nonlocal victim
        victim = None  # once: a process that was stopped may go on
        for mate in job.mates:
            os.kill(pids[mate], job.by)
        os.kill(os.getpid(), job.by)

    def at(place: str) -> None:
        if (rank, place) == (victim, where) and state.step_number >= from_step:
            die()

    if rank == victim and where == "copying":
        die_while_sending(from_step, die)
    if rank == victim and where == "moving":
        die_while_moving(die)
    with state:
        optimizer.register_step_pre_hook(lambda *_: at("gate"))
        for x, y in data.batches(state, steps=job.steps):
            loss = F.cross_entropy(model(x), y) * data.weight
            at("forward")
            loss.backward()
            at("backward")
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            at("torn")
            scheduler.step()
            optimizer.zero_grad()
            for mean, value in zip(averaged.parameters(), model.parameters(), strict=True):
                mean.lerp_(value.detach(), 0.1)
            if job.odd == (rank, state.step_number, "stop"):
                os.kill(os.getpid(), signal.SIGTERM)
            if job.odd is not None and job.odd[0] == rank and job.odd[2] == "full":
                fill_memory(state.step_number in range(job.odd[1], job.odd[1] + 3))
            state.step(loss=loss)
            at("committed")
    if job.plain is not None and not job.plain.exists():
        save_plain(model, optimizer, job.plain)
    both = {**model.state_dict(), **averaged.state_dict(prefix="ema.")}
    whole = {name.replace(".", "_"): value.full_tensor() for name, value in both.items()}
    return nn.ParameterDict(whole)


def unlike(job: LoopJob, rank: int) -> Any:
    """A sharded loop of layers of one size, in which ranks do not do the same at the odd step, or
    leave out a layer in the second of its passes. torch would train on, with another layer's
    gradients or with none."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    mesh = mesh_of(job)

    class Layers(nn.Sequential):
        def forward(self, x: Any, without: int | None = None, ahead: int | None = None) -> Any:
            if ahead is not None:
                self[ahead].unshard()
            for number, layer in enumerate(self):
                x = x if number == without else x + layer(x).tanh()
            return x

    model = Layers(*(fully_shard(nn.Linear(16, 16), mesh=mesh) for _ in range(4)))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    state = protect(job, model=model, optimizer=optimizer)
    _, at, what = job.odd or (0, -1, "")
    with state:
        while state.step_number < job.steps:
            is_odd = state.step_number == at
            without = 1 + rank if is_odd and what == "skip" else None
            model.set_requires_gradient_sync(not (is_odd and what == "unsummed"))
            if is_odd and what == "partial":
                model.set_requires_all_reduce(False)
                model(torch.randn(6, 16)).square().mean().backward()
                model.set_requires_all_reduce(True)
                without = 1
            ahead = 2 if is_odd and what == "gather" and rank else None
            if is_odd and what == "another":
                model[rank].weight.full_tensor()
            if is_odd and what == "alone" and rank:
                with torch.no_grad():
                    model(torch.randn(6, 16))
            loss = model(torch.randn(6, 16), without, ahead).square().mean()
            loss.backward()
            if is_odd and what == "drop" and rank:
                for weight in model[3].parameters():
                    weight.grad = None
            if is_odd and what == "rate" and rank:
                optimizer.param_groups[0]["lr"] *= 2
            optimizer.step()
            optimizer.zero_grad()
            if is_odd and what == "looking" and rank == 0:
                model[0].weight.full_tensor()
            state.step(loss=loss)
    return nn.ParameterDict({f"of_{n}": each.weight.full_tensor() for n, each in enumerate(model)})


def save_plain(model: Any, optimizer: Any, directory: Path) -> None:
    """Save as a trainer does that knows nothing of Everstep."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=directory)


def load_plain(model: Any, optimizer: Any, directory: Path) -> None:
    """Load what ``save_plain`` has saved, at any number of ranks."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


def die_while_sending(step: int, die: Callable[[], None]) -> None:
    """Let this rank die when half of a piece is on its way to its heir, of that step or later."""
    from train_fn.snapshots import links as links_module

    send = links_module.PieceLinks.send

    def sending(links: Any, rank: int, label: Any) -> None:
        if label.step < step:
            send(links, rank, label)
        else:
            send_half(links, rank, label)
            die()

    links_module.PieceLinks.send = sending  # type: ignore[method-assign]


def die_while_moving(die: Callable[[], None]) -> None:
    """Let this rank die when pieces of an earlier attempt move to the nodes that need them: in the
    middle of one that it sends, or that it receives, else beside them."""
    from train_fn.snapshots.pieces import PieceKeeper

    bring = PieceKeeper.bring

    def receive_some(keeper: Any, label: Any, blocks: Any) -> Any:
        yield next(iter(blocks))
        die()

    def dying(keeper: Any, wanted: Any) -> Any:
        rank = keeper._peers.rank
        for move, label in wanted.items():
            if move.source == rank:
                send_half(keeper._links, move.target, label)
                die()
        if not any(move.target == rank for move in wanted):
            die()
        PieceKeeper._noticed = receive_some  # type: ignore[method-assign]
        return bring(keeper, wanted)

    PieceKeeper.bring = dying  # type: ignore[method-assign]


def send_half(links: Any, rank: int, label: Any) -> None:
    """Send the first half of a snapshot's file."""
    from train_fn.snapshots import links as links_module

    with links._store.open(label) as file:
        data = file.read()
    said = json.dumps(asdict(label)).encode()
    head = links_module._HEAD.pack(len(said), len(data)) + said
    links._to(rank).sendall(head + data[: len(data) // 2])


def fill_memory(is_full: bool) -> None:
    """Let this process's writes of files fail beyond a kilobyte, as those of a full memory do."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024 if is_full else most, most))


def own_data(job: LoopJob, rank: int) -> Any:
    """A loop that makes its samples by the step, and may do what its peers do not."""
    import torch
    from torch import nn

    torch.manual_seed(3)
    bare = nn.Linear(8, 4)
    model = wrapped(bare, job)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    state = protect(job, model=model, optimizer=optimizer)
    with state:
        while state.step_number < job.steps:
            step = state.step_number
            loss = model(torch.randn(6, 8)).square().mean()
            loss.backward()
            optimizer.step()
            if job.odd == (rank, step, "update"):
                optimizer.step()
            die(job, rank, step, "torn")
            optimizer.zero_grad()
            state.step(loss=loss)
            if job.odd == (rank, step, "commit"):
                state.step(loss=loss)
    return bare


class Noisy:
    """200 samples, each with noise of its own in every epoch."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Any:
        import torch

        values = torch.arange(8, dtype=torch.float32).add(index).sin()
        return values + 0.1 * torch.randn(8), index % 4
