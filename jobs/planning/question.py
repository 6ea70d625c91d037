"""Build the planner's question from a conf: model, batch, nodes, prices, and the fixed keys.

`build_question` is pure; `read_question` and `load_question` read the conf's file, the profile,
sinfo, and the installed torch's version.

A key that the conf writes is fixed, unless it is auto. Other keys are free for `vjob plan`, and
have their defaults for `vjob submit`.
"""

from __future__ import annotations

import importlib.metadata
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from varuna_core.facts.known import NotKnown
from varuna_core.facts.not_covered import Lack, NotCovered
from varuna_core.planner.model.cluster import Cluster, NodeKind
from varuna_core.planner.model.training import MEGATRON, RECOMPUTES, TrainingModel
from varuna_core.planner.profile.errors import PlanningError
from varuna_core.planner.profile.gpus import GpuProduct, find_gpu, list_gpus
from varuna_core.planner.profile.profile import Model, Profile, build_link
from varuna_core.planner.profile.profile_file import read_profile
from varuna_core.planner.profile.transformer import (
    LATENCY_S,
    Transformer,
    estimate_profile,
    list_parts,
)
from varuna_core.planner.search.space import Wishes
from varuna_core.records.training import name_shapes
from varuna_core.schedule.recompute import Recompute
from vjob.jobs.conf.loading.check import check_program
from vjob.jobs.conf.schema import BUILT_IN, JobConf, NodeGroup
from vjob.jobs.conf.world_size import close_layout
from vjob.jobs.errors import InputError
from vjob.jobs.planning.inputs import find_profile, read_open_conf
from vjob.jobs.programs.training import build_training, name_model
from vjob.jobs.schedulers import choose as schedulers

CPU = "cpu"
"""A profile's kind for a rank without a GPU."""
LINK_GB_S = 12.5
"""Assumed GB/s between nodes without a measurement: 100 Gbit/s."""
ESTIMATE = (
    "an estimate from data sheets, nothing was measured; in 688 published runs its steps were off "
    "by -75 to +80 %"
)
"""Basis of a question without a profile, with figures from benchmarks/results/estimates.md."""
NO_LINK = build_link(0.0, LINK_GB_S)
"""Link of a single node, which is never used."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Everything that a search needs, with its source."""

    profile: Profile
    training: TrainingModel
    cluster: Cluster
    wishes: Wishes
    basis: str
    """Source of the figures, as a phrase."""
    is_estimate: bool
    """True if nothing was measured."""
    steps: int
    """Steps of the whole run."""
    is_megatron: bool = False
    """True for Megatron-LM, which takes a partition as a layout of its own."""
    may_have_zero_3: bool = False
    """True if the program supports ZeRO 3 with the conf's other keys."""
    notes: tuple[str, ...] = ()
    """Assumptions that were made."""
    lacks: tuple[NotCovered, ...] = ()
    """Parts of every plan that may differ from the profile, so that predictions are less
    certain."""


def build_question(
    conf: JobConf,
    fixed: Collection[str],
    *,
    profile: Profile | None,
    basis: str,
    prices: Mapping[str, float],
    software: Mapping[str, str],
    link_gb_s: float | None = None,
) -> Question:
    """Build the question; `fixed` are the keys that the search must keep.

    Raise InputError or PlanningError if the conf does not allow one.
    """
    batch = conf.train.global_batch_size
    if batch is None:
        raise InputError(
            "train.global_batch_size is not set: the planner divides one batch among the nodes, "
            "and its default depends on the layout; set it, or --set train.global_batch_size=N"
        )
    if conf.parallel.context > 1:
        raise InputError(
            "the planner does not model parallel.context: plan with --set parallel.context=1"
        )
    notes, is_estimate = [], profile is None
    lacks: tuple[NotCovered, ...] = ()
    if profile is None:
        profile, more = estimate(conf, link_gb_s)
        basis = ESTIMATE
        notes += more
    else:
        check_profile(conf, profile, software)
        lacks = tuple(list_not_compared(conf, profile, software))
    cluster = build_cluster(conf.cluster.nodes, profile, {**conf.prices, **prices})
    profile, more = fill_links(profile, cluster, link_gb_s)
    notes += more
    return Question(
        profile=profile,
        training=describe_training(conf, batch),
        cluster=cluster,
        wishes=build_wishes(conf, fixed, profile.model.num_segments),
        basis=basis,
        is_estimate=is_estimate,
        steps=conf.train.steps,
        is_megatron=conf.program.kind == "megatron",
        may_have_zero_3=may_have_zero_3(conf),
        notes=tuple(notes),
        lacks=lacks,
    )


def list_not_compared(
    conf: JobConf, profile: Profile, software: Mapping[str, str]
) -> Iterator[NotCovered]:
    """Yield the parts that cannot be compared with the profile."""
    if conf.program.kind not in BUILT_IN:
        subject = f"profile for {profile.model.name!r}, but the program is a {conf.program.kind}"
        yield NotCovered(Lack.MODEL, subject, NotKnown("times are right if models are the same"))
    names = sorted(profile.software.keys() - software.keys() - {"cuda"})
    if names:
        yield NotCovered(Lack.SOFTWARE, ", ".join(names), NotKnown("versions may change the times"))
    for name in sorted({group.gpu_type for group in conf.cluster.nodes if group.gpu_type}):
        if name not in profile.gpus and len(list_gpus(name)) > 1:
            subject = f"GPU {name} is assumed to be {match_kind(name, profile)} of the profile"
            yield NotCovered(Lack.MEMORY, subject, NotKnown("memory of the profile's GPU is used"))


def may_have_zero_3(conf: JobConf) -> bool:
    """Return True if the conf may use ZeRO 3; False also for a program that is not built in, since
    only the program itself knows."""
    if conf.program.kind not in BUILT_IN:
        return False
    changed = close_layout(replace(conf, parallel=replace(conf.parallel, zero=3, tensor=1)))
    return not any(key == "parallel.zero" for key, _, _ in check_program(changed))


def describe_training(conf: JobConf, batch: int) -> TrainingModel:
    """Describe the training's bytes of weights and optimizer state for each parameter."""
    if conf.program.kind in ("megatron", "deepspeed"):
        return replace(MEGATRON, batch=batch)
    train = conf.train
    halved = train.precision != "fp32"
    moments = 4 if train.optimizer.name == "sgd" else 8
    state = 0 if train.optimizer.offload else moments + (4 if halved else 0)
    return TrainingModel(
        batch=batch,
        weight_bytes=2 if halved else 4,
        state_bytes=state,
        recomputes=list_recomputes(conf),
        may_have_several_stages=conf.program.kind in BUILT_IN,
    )


def list_recomputes(conf: JobConf) -> tuple[Recompute, ...]:
    """Return the recompute modes that a plan may use; a program that is not built in gets `none`
    and `full`, since its own code decides."""
    if conf.program.kind not in BUILT_IN:
        return ("none", "full")
    on_gpus = all(group.num_gpus for group in conf.cluster.nodes)
    train = conf.train
    left_out = {
        "auto": not on_gpus,  # of a host nobody knows what graphs may take
        "selective": train.compile,
        "offload": not on_gpus or train.cuda_graphs,  # which stages that offload do without
    }
    return tuple(way for way in RECOMPUTES if not left_out.get(way))


def check_profile(conf: JobConf, profile: Profile, software: Mapping[str, str]) -> None:
    """Raise PlanningError if the profile is of another model than the conf's."""
    if conf.program.kind not in BUILT_IN or conf.model is None:
        return  # only the script itself knows its model
    plain = close_layout(conf)
    training = build_training(plain, 1)
    assert training is not None, "a built-in program has training settings"
    wanted = Model(
        name=name_model(conf.model),
        digest=name_shapes(training),
        num_segments=conf.model.layers + 2,
        parameters={},
    )
    profile.check_is_of(wanted, software)


def estimate(conf: JobConf, link_gb_s: float | None) -> tuple[Profile, list[str]]:
    """Estimate a profile from the model's sizes and data sheets; return the assumptions too."""
    model = conf.model
    if model is None:
        raise InputError(
            "the conf has no model, and names no profile: set model to its shape (a name such "
            "as gpt2-xl, or layers, hidden, heads), or profile the script (docs/profiling.md) "
            "and give --profile FILE"
        )
    bare = [group.group for group in conf.cluster.nodes if group.num_gpus == 0]
    if bare:
        raise InputError(
            f"group {bare[0]} of cluster.nodes has no GPUs, but CPUs have no estimate: give "
            'gpus, such as "a100:4", or plan with --from-slurm or a measured --profile'
        )
    notes = []
    kinds = set()
    for name in sorted({name_gpu(group) for group in conf.cluster.nodes}):
        gpu, others = choose_product(name)
        kinds.add(gpu.name if others else name)
        if others:
            notes.append(f"GPU {name} is taken to be {gpu.name}, not {' or '.join(others)}: `vjob "
                         "profile` measures the nodes' own sizes")  # fmt: skip
    largest = max(group.num_ranks for group in conf.cluster.nodes)
    llama = model.build_llama()
    kv_heads = model.heads if llama is None else llama.kv_heads
    found = estimate_profile(
        Transformer(
            name=name_model(model),
            layers=model.layers,
            hidden=model.hidden,
            heads=model.heads,
            length=model.sequence,
            vocabulary=model.vocab,
            **list_parts(llama),
        ),
        sorted(kinds),
        degrees=[t for t in (1, 2, 4, 8) if t <= largest and kv_heads % t == 0],
        inter_gb_s=LINK_GB_S if link_gb_s is None else link_gb_s,
        element_bytes=4 if conf.train.precision == "fp32" else 2,
    )
    if link_gb_s is None and sum(group.count for group in conf.cluster.nodes) > 1:
        notes.append(f"links between nodes are assumed to have {LINK_GB_S:g} GB/s; set --link GB/S")
    return found, notes


def keep_known_groups(
    groups: Sequence[NodeGroup], profile: Profile | None
) -> tuple[list[NodeGroup], list[str]]:
    """Return the groups whose GPUs can be planned for, and notes on the others.

    Raise PlanningError if there are none.
    """
    kept, notes = [], []
    for group in groups:
        try:
            if profile is not None:
                match_kind(name_gpu(group), profile)
            else:
                choose_product(name_gpu(group))
        except PlanningError as error:
            notes.append(f"left out {group.count} x {group.gpus}: {error}")
        else:
            kept.append(group)
    if not kept:
        raise PlanningError("\n  ".join(notes))
    return kept, notes


def build_cluster(
    groups: Sequence[NodeGroup], profile: Profile, prices: Mapping[str, float]
) -> Cluster:
    """Build the planner's cluster, with one kind of node for each group."""
    kinds = []
    for group in groups:
        if group.num_gpus == 0 and CPU in profile.gpus:
            gpu = CPU
        elif group.gpu_type is None and group.num_gpus and len(profile.gpus) == 1:
            gpu = next(iter(profile.gpus))
        else:
            gpu = match_kind(name_gpu(group), profile)
        kinds.append(
            NodeKind(
                name=group.group,
                gpu=gpu,
                gpus=group.num_ranks,
                count=group.count,
                price_per_hour=find_price(group, gpu, prices),
            )
        )
    return Cluster(kinds=tuple(kinds))


def fill_links(
    profile: Profile, cluster: Cluster, link_gb_s: float | None
) -> tuple[Profile, list[str]]:
    """Return the profile with the links that it lacks between this cluster's nodes, estimated with
    `link_gb_s` (--link) if given, and notes on the estimates.

    A link between two nodes of a kind cannot be measured if the cluster has only one such node, and
    no plan uses the link: it gets the values of another link of that kind.
    """
    links = dict(profile.network.links)
    counts: Counter[str] = Counter()
    for kind in cluster.kinds:
        counts[kind.gpu] += kind.count
    notes = []
    for a, b in itertools.product(sorted(counts), repeat=2):
        if (a, b, "inter") in links or (b, a, "inter") in links:
            continue
        if a == b and counts[a] == 1:
            own = [(a, c, "inter") for c in counts] + [(c, a, "inter") for c in counts]
            found = [link for key, link in profile.network.links.items() if key in own]
            inside = profile.network.links.get((a, a, "intra"))
            links[a, a, "inter"] = found[0] if found else inside or NO_LINK
        elif link_gb_s is not None:
            links[a, b, "inter"] = build_link(LATENCY_S["inter"], link_gb_s)
            notes.append(f"no link from {a} to {b} was measured: {link_gb_s:g} GB/s as --link says")
    network = replace(profile.network, links=links)
    return replace(profile, network=network), notes


def name_gpu(group: NodeGroup) -> str:
    """Return the GPU of a group as the conf names it."""
    if group.gpu_type is not None:
        return group.gpu_type
    if group.num_gpus:
        raise PlanningError(
            f"group {group.group} has {group.num_gpus} GPUs of unknown type: set the type, such as "
            f'gpus: "a100:{group.num_gpus}"'
        )
    return CPU


def choose_product(name: str) -> tuple[GpuProduct, list[str]]:
    """Choose the GPU for a GRES without a memory size, such as `a100`: the smallest; and list the
    other products of that name."""
    found = list_gpus(name)
    if not found:
        return find_gpu(name), []  # which raises, with all names
    return found[0], [gpu.name for gpu in found[1:]]


def match_kind(name: str, profile: Profile) -> str:
    """Return the profile's name for a GPU that the conf or a GRES names differently."""
    if name in profile.gpus:
        return name
    alike = [kind for kind in profile.gpus if kind.casefold() == name.casefold()]
    if not alike:
        alike = [kind for kind in profile.gpus if _is_same_product(name, kind)]
    if len(alike) == 1:
        return alike[0]
    known = ", ".join(sorted(profile.gpus))
    if alike:
        raise PlanningError(f"GPU {name!r} may be {' or '.join(sorted(alike))} of the profile")
    raise PlanningError(
        f"the profile has no GPU {name!r}, only {known}: profile the model on it (`vjob "
        "profile` extends a profile), or `vjob plan --estimate`"
    )


def _is_same_product(name: str, kind: str) -> bool:
    try:
        wanted = find_gpu(kind).name
    except PlanningError:
        return False
    try:
        return find_gpu(name).name == wanted
    except PlanningError:  # `a100` without its size may be either
        product = wanted.partition("-")[0].casefold()
        return product in name.casefold().replace("_", "-").split("-")


def find_price(group: NodeGroup, gpu: str, prices: Mapping[str, float]) -> float | None:
    """Return the price of a node-hour by the conf's name of the GPU, the profile's, the product
    (`a100` for both of its sizes), or the group's name."""
    known = {name.casefold(): price for name, price in prices.items()}
    products = [name.partition("-")[0] for name in (group.gpu_type or "", gpu)]
    for name in (group.gpu_type, gpu, *products, group.group):
        if name is not None and name.casefold() in known:
            return known[name.casefold()]
    return None


def build_wishes(conf: JobConf, fixed: Collection[str], num_segments: int) -> Wishes:
    """Build the limits of the search; a key in `fixed` whose value is auto stays free."""
    parallel = conf.parallel

    def take(key: str, value: int | str | None) -> int | None:
        return value if key in fixed and isinstance(value, int) else None

    partition = None
    if parallel.partition != "auto":
        partition = parallel.partition.with_ends(num_segments).counts
    has_empty = partition is not None and 0 in partition
    schedule = None if parallel.schedule == "auto" else parallel.schedule
    if schedule is None and conf.program.kind in ("megatron", "deepspeed"):
        schedule = "1f1b"  # their own default
    return Wishes(
        stages=take("parallel.pipeline", parallel.pipeline),
        replicas=take("parallel.data", parallel.data),
        tensor=take("parallel.tensor", parallel.tensor),
        micro_batch=take("train.micro_batch_size", conf.train.micro_batch_size),
        zero=take("parallel.zero", parallel.zero),
        schedule=schedule,
        recompute=None if parallel.recompute == "auto" else parallel.recompute,
        least=0 if has_empty else 1,
        partition=partition,
    )


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    overrides: tuple[str, ...] = ()
    profile: Path | None = None
    is_estimated: bool = False
    """True to estimate even if there is a profile."""
    link_gb_s: float | None = None
    prices: Mapping[str, float]
    from_slurm: bool = False
    queue: str | None = None


def read_question(
    path: Path, options: PlanOptions, *, text: str | None = None
) -> tuple[JobConf, Question]:
    """Read a conf file; return the conf with the nodes to plan for, and the question."""
    read = read_open_conf(path, options.overrides, text=text)
    conf, fixed, base = read.conf, read.lines.keys(), path.resolve().parent
    if not options.from_slurm:
        return conf, load_question(conf, fixed, base, options)
    _, profile = load_profile(conf, base, options)
    nodes, left_out = keep_known_groups(find_nodes(options.queue), profile)
    conf = replace(conf, cluster=replace(conf.cluster, nodes=tuple(nodes)))
    question = load_question(conf, fixed, base, options)
    return conf, replace(question, notes=(*question.notes, *left_out))


def load_profile(
    conf: JobConf, base: Path, options: PlanOptions
) -> tuple[Path | None, Profile | None]:
    """Return the profile's file and content; no content if an estimate is to be used."""
    file = options.profile or find_profile(conf, base)
    return file, None if file is None or options.is_estimated else read_profile(file)


def load_question(
    conf: JobConf, fixed: Collection[str], base: Path, options: PlanOptions
) -> Question:
    """Return the question for a conf in folder `base`; the search must keep the keys `fixed`."""
    file, profile = load_profile(conf, base, options)
    return build_question(
        conf,
        fixed,
        profile=profile,
        basis=describe_basis(file, profile),
        prices=options.prices,
        software=find_software(conf),
        link_gb_s=options.link_gb_s,
    )


def find_nodes(queue: str | None) -> list[NodeGroup]:
    """Return the node groups that the first scheduler with a queue shows now."""
    return next(schedulers.list_with_queue()).list_nodes(queue)


def describe_basis(file: Path | None, profile: Profile | None) -> str:
    if file is None or profile is None:
        return ""
    versions = ", ".join(f"{name} {text}" for name, text in sorted(profile.software.items()))
    return f"profile {file}" + (f" ({versions})" if versions else "")


def find_software(conf: JobConf) -> dict[str, str]:
    """Return the ranks' library versions; empty if they have another Python."""
    if conf.container.image is not None or conf.program.python is not None:
        return {}
    try:
        return {"torch": importlib.metadata.version("torch")}
    except importlib.metadata.PackageNotFoundError:
        return {}
