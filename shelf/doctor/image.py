"""`vjob container doctor`: what an image holds for a training, and what of a conf it lacks.

Judges are pure but for the files that they read: the image's (jobs/images), and the program's own
script where it lies here. What a script does beyond its imports is not looked at.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vjob.jobs.conf.schema import BUILT_IN, JobConf
from vjob.jobs.errors import InputError
from vjob.jobs.images import software as softwares
from vjob.jobs.images.contents import Contents
from vjob.jobs.images.inspect import ENVIRONMENT, find_system, parse_environment
from vjob.jobs.images.software import Software, find_program, has_module, parse_version
from vjob.jobs.programs.start import RUNTIME, ProgramFiles, get_starter
from vjob.jobs.schedulers.diagnosis import Diagnosis, Status, read_text

DRIVER = "/proc/driver/nvidia/version"
DRIVERS: Mapping[int, str] = {11: "450.80.02", 12: "525.60.13", 13: "580"}
"""The oldest driver for programs of each CUDA: NVIDIA's table of minor version compatibility."""
SHOWN = ("apex", "megatron-core", "transformer-engine", "deepspeed")
TIMELINE = "3.9"
"""The oldest Python of varuna_core/trace/startup."""
PYXIS = "3.8"
"""The agent's own, which pyxis has run inside."""
NEWER = "`vjob container build gpu-small` makes an image that has them, docs/images.md has others"
COMPILERS = ("cc", "gcc", "clang")


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image as ranks would find it."""

    contents: Contents
    environment: Mapping[str, str]
    software: Software


def open_image(contents: Contents, conf: JobConf | None = None) -> Image:
    """Read what there is, for the Python and the variables of a conf's ranks if there is one."""
    environment = parse_environment(contents.read(ENVIRONMENT))
    python = "python3"
    if conf is not None:
        environment = {**environment, **conf.env}
        python = conf.program.python or python
    found = softwares.find_software(contents, environment, python)
    return Image(contents=contents, environment=environment, software=found)


def read_driver() -> str:
    """Version of this machine's NVIDIA driver; empty where there is none."""
    match = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", read_text(DRIVER) or "")
    return match[0] if match else ""


def examine_image(image: Image, driver: str) -> list[Diagnosis]:
    """What is in the image, and whether this machine's driver can run it."""
    found = image.software
    system = find_system(image.contents) or "the image does not say"
    rows = [Diagnosis(name="system", status="ok", text=system), judge_python(image)]
    if found.torch:
        build = f"for CUDA {found.torch_cuda}" if found.torch_cuda else "without CUDA"
        build = f"for ROCm {found.torch_rocm}" if found.torch_rocm else build
        rows.append(Diagnosis(name="torch", status="ok", text=f"{found.torch}, built {build}"))
    else:
        rows.append(Diagnosis(name="torch", status="note", text="not there"))
    rows += judge_cuda(found, driver)
    for name in SHOWN:
        version = found.packages.get(name, "")
        rows.append(
            Diagnosis(name=name, status="ok" if version else "note", text=version or "not there")
        )
    return [judge_apex(image) if row.name == "apex" else row for row in rows]


def judge_python(image: Image) -> Diagnosis:
    found = image.software
    if found.python_version:
        text = f"{found.python_version}, {found.python}"
        return Diagnosis(name="python", status="ok", text=text)
    if found.python:
        text = f"{found.python} is there, and the files around it do not say its version"
        return Diagnosis(name="python", status="note", text=text)
    others = [f"{folder}/python3" for folder in softwares.OFF_PATH]
    others = [path for path in others if image.contents.exists(path)]
    if others:
        text, remedy = "no python3 on the image's PATH", f"set program.python: {others[0]}"
        return Diagnosis(name="python", status="note", text=text, remedy=remedy)
    return Diagnosis(name="python", status="note", text="none: no training runs in this image")


def judge_cuda(found: Software, driver: str) -> Iterator[Diagnosis]:
    """CUDA, the driver that it needs, and NCCL; one line where there is no CUDA at all."""
    cuda = found.torch_cuda or found.cuda
    if not cuda:
        yield Diagnosis(name="cuda", status="note", text="not there: for CPUs")
        return
    text = f"toolkit {found.cuda}" if found.cuda else f"{cuda}, without the toolkit (no nvcc)"
    yield Diagnosis(name="cuda", status="ok", text=text)
    yield judge_driver(cuda, found.cuda_compat, driver)
    if found.nccl:
        yield Diagnosis(name="nccl", status="ok", text=found.nccl)
    else:
        text = "no library of its own; some builds of torch have it within"
        yield Diagnosis(name="nccl", status="note", text=text)


def judge_driver(cuda: str, compat: str, driver: str) -> Diagnosis:
    """The driver of this machine; that of the nodes may be another."""
    needed = DRIVERS.get((parse_version(cuda) or (0,))[0], "")
    wanted = f"CUDA {cuda} needs {needed} or later" if needed else f"CUDA {cuda}"
    status: Status = "note"
    if not driver:
        text = f"no NVIDIA driver on this machine; {wanted}"
        remedy = "run it on a node, with srun before it, to compare with the driver there"
        return Diagnosis(name="driver", status=status, text=text, remedy=remedy)
    text = f"{driver} here; {wanted}"
    if not needed:
        return Diagnosis(name="driver", status=status, text=f"{text}: not in vjob's table")
    if parse_version(driver) >= parse_version(needed):
        return Diagnosis(name="driver", status="ok", text=text)
    if compat:
        status, text = "warn", f"{text}; the image brings libraries of {compat} for older drivers"
        remedy = "these work on data center GPUs alone, and only with some drivers"
        return Diagnosis(name="driver", status=status, text=text, remedy=remedy)
    remedy = "take an image of an older CUDA, or ask for a newer driver"
    return Diagnosis(name="driver", status="fail", text=text, remedy=remedy)


def judge_apex(image: Image) -> Diagnosis:
    version = image.software.packages.get("apex", "")
    has_kernels = has_module(image.contents, image.software, "amp_C")
    if version and has_kernels:
        return Diagnosis(name="apex", status="ok", text=f"{version}, with its compiled parts")
    if version:
        text = f"{version}: not NVIDIA's, or without its compiled parts (amp_C)"
        return Diagnosis(name="apex", status="note", text=text)
    return Diagnosis(name="apex", status="note", text="not there")


def judge_programs(found: Software) -> Diagnosis:
    """The programs that train with varuna_core have the narrowest needs."""
    name, own = "programs", f"{', '.join(BUILT_IN)} and scripts that use varuna_core"
    lacks = find_lacks(found, RUNTIME)
    if not lacks:
        return Diagnosis(name=name, status="ok", text=f"{own} have what they need")
    text = f"{own} need {', '.join(lacks)}"
    remedy = f"other scripts, megatron and deepspeed may run with less; {NEWER}"
    return Diagnosis(name=name, status="note", text=text, remedy=remedy)


def find_lacks(found: Software, needs: Mapping[str, str]) -> list[str]:
    """Each package that is missing or too old, as `torch 2.9 or later (it has 2.1.0)`."""
    lacks = []
    for name, oldest in needs.items():
        have = {"python": found.python_version, "torch": found.torch}.get(
            name, found.packages.get(name, "")
        )
        word = "Python" if name == "python" else name
        wanted = f"{word} {oldest} or later" if oldest else word
        if not have:
            lacks.append(f"{wanted} (the image has none)")
        elif oldest and parse_version(have) < parse_version(oldest):
            lacks.append(f"{wanted} (the image has {have})")
    return lacks


def judge_conf(conf: JobConf, written: Collection[str], image: Image) -> list[Diagnosis]:
    """What of a conf would not work in the image; one line that says so where there is nothing."""
    rows = [
        *_judge_start(conf, image),
        *_judge_program(conf, image),
        *_judge_script(conf, image),
        *_judge_training(conf, image),
        *_judge_profile(conf, written, image),
        *_judge_tools(conf, image),
    ]
    if rows:
        return rows
    text = "nothing found that the image lacks for it"
    return [Diagnosis(name="conf", status="ok", text=text)]


def _judge_start(conf: JobConf, image: Image) -> Iterator[Diagnosis]:
    """A shell, which every runtime enters by, and the ranks' Python."""
    container, found = conf.container, image.software
    if container.image is None or container.runtime == "none":
        text = "the conf runs its ranks without a container; here it is held against this image"
        yield Diagnosis(name="container", status="note", text=text)
    if not image.contents.exists("/bin/sh"):
        text = "no /bin/sh in the image: ranks are started by it"
        remedy = "install a shell, such as Debian's dash"
        yield Diagnosis(name="container", status="fail", text=text, remedy=remedy)
    python = conf.program.python or "python3"
    if not found.python and not _is_mounted(conf, python):
        place = "in the image" if "/" in python else "on the image's PATH"
        remedy = judge_python(image).remedy if conf.program.python is None else ""
        yield Diagnosis(
            name="program.python",
            status="fail",
            text=f"{python} is not {place}",
            remedy=remedy or "install it in the image, or set program.python to one that is there",
        )
    if container.runtime == "pyxis":
        path = find_program(image.contents, image.environment, "bash")
        if not path:
            text = "pyxis needs bash in the image"
            yield Diagnosis(name="container.runtime", status="fail", text=text, remedy=_INSTALL)
        if lacks := find_lacks(_find_agents(image), {"python": PYXIS}):
            text = f"with pyxis vjob's agent runs in the image, and needs {lacks[0]}"
            remedy = "install it in the image, or take another container.runtime"
            yield Diagnosis(name="container.runtime", status="fail", text=text, remedy=remedy)


_INSTALL = "install it in the image"


def _find_agents(image: Image) -> Software:
    """The python3 on PATH: program.python is the ranks' alone."""
    return softwares.find_software(image.contents, image.environment)


def _judge_program(conf: JobConf, image: Image) -> Iterator[Diagnosis]:
    """What the kind of program asks for, whatever else is in the conf."""
    found, kind = image.software, conf.program.kind
    if not found.python_version:
        return  # said above
    starter = get_starter(conf)
    try:
        files = starter.read_files(conf)
    except InputError as error:
        yield Diagnosis(name="program", status="fail", text=str(error))
        files = ProgramFiles()
    if lacks := find_lacks(found, starter.list_packages(conf, files)):
        text = f"{kind} needs {', '.join(lacks)}"
        yield Diagnosis(name="program", status="fail", text=text, remedy=_get_remedy(kind))
    modules = starter.list_modules(conf)
    missing = [name for name, _ in modules if not has_module(image.contents, found, name)]
    if missing:
        text = f"the image's Python lacks {' and '.join(missing)}"
        wanted = "; ".join(dict.fromkeys(remedy for name, remedy in modules if name in missing))
        yield Diagnosis(name="modules", status="fail", text=text, remedy=wanted)
    if kind == "megatron":
        yield from _judge_megatron(conf, files, image)


def _get_remedy(kind: str) -> str:
    if kind in BUILT_IN:
        return f"{NEWER}; in this one run a script, or megatron"
    return "install it in the image, or take an image that has it (docs/images.md)"


def _judge_megatron(conf: JobConf, files: ProgramFiles, image: Image) -> Iterator[Diagnosis]:
    """Options without which today's Megatron-LM ends at its first layer."""
    checkout, found = files.checkout, image.software
    if checkout is None or checkout.generation != "core":
        return
    place = str(Path(checkout.script).parent / "pyproject.toml")
    settings = read_text(place) or image.contents.read(place)
    asked = re.search(r"^requires-python *= *[\"'] *>= *([\d.]+)", settings, re.MULTILINE)
    if asked is not None and (lacks := find_lacks(found, {"python": asked[1]})):
        text = f"the checkout needs {lacks[0]}"
        remedy = "take an older checkout, or a newer image"
        yield Diagnosis(name="program.megatron", status="fail", text=text, remedy=remedy)
    args = {*conf.program.args}
    has_kernel = has_module(image.contents, found, "fused_weight_gradient_mlp_cuda")
    if not has_kernel and "--no-gradient-accumulation-fusion" not in args:
        text = "no apex with its compiled parts, which sums of gradients use by default"
        remedy = "program.args: [--no-gradient-accumulation-fusion]"
        yield Diagnosis(name="program.args", status="warn", text=text, remedy=remedy)
    is_local = {"local", "--transformer-impl=local"} & args
    if "transformer-engine" not in found.packages and not is_local:
        text = "no transformer-engine, which layers are made of by default"
        remedy = "program.args: [--transformer-impl, local]"
        yield Diagnosis(name="program.args", status="warn", text=text, remedy=remedy)


def _judge_script(conf: JobConf, image: Image) -> Iterator[Diagnosis]:
    """Where a script is, and whether what it imports is there."""
    path, found = conf.program.path, image.software
    if path is None or conf.program.kind not in ("script", "deepspeed", "megatron"):
        return
    key = f"program.{conf.program.kind}"
    is_inside = image.contents.exists(path)
    if not Path(path).exists() and not is_inside and not _is_mounted(conf, path):
        text = f"{path} is neither here nor in the image nor below container.mounts"
        yield Diagnosis(name=key, status="fail", text=text)
    text = read_text(path) or (image.contents.read(path) if is_inside else "") or ""
    if conf.program.kind == "megatron" or not found.python_version or not text:
        return
    imported = list_imports(text)
    needs = RUNTIME if any(_is_of_runtime(name) for name in imported) else {}
    if lacks := find_lacks(found, needs):
        text = f"the script uses varuna_core, which needs {', '.join(lacks)}"
        yield Diagnosis(name=key, status="fail", text=text, remedy=NEWER)
    asked = get_starter(conf).list_packages(conf, ProgramFiles())  # said of the program
    named = conf.env.get("PYTHONPATH", "").split(":")
    folders = [Path(path).parent, *(Path(folder) for folder in named if folder)]
    missing = [
        name
        for name in dict.fromkeys(name.partition(".")[0] for name in imported)
        if name not in (*sys.stdlib_module_names, *asked)
        and name.replace("_", "-").lower() not in found.packages  # pip install -e leaves no more
        and not has_module(image.contents, found, name)
        and not any((folder / end).exists() for folder in folders for end in (name, f"{name}.py"))
    ]
    if missing:
        text = f"the script imports {', '.join(missing)}, not found in the image or beside it"
        remedy = "install it in the image, or name its folder in env.PYTHONPATH and mount that"
        yield Diagnosis(name=key, status="warn", text=text, remedy=remedy)


def list_imports(text: str) -> list[str]:
    """Dotted names that a script imports as it starts, without those that it tries for."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []  # of another Python, perhaps
    found: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def _is_of_runtime(name: str) -> bool:
    """varuna_core but for its spans, which take no torch."""
    top, _, rest = name.partition(".")
    return top == "varuna_core" and rest.partition(".")[0] != "trace"


def _judge_training(conf: JobConf, image: Image) -> Iterator[Diagnosis]:
    found = image.software
    has_gpus = any(group.num_gpus for group in conf.cluster.nodes)
    if has_gpus and found.torch and not (found.torch_cuda or found.torch_rocm):
        text = f"nodes have GPUs, and torch {found.torch} is a build without CUDA"
        remedy = "install torch for CUDA in the image, or ask for no gpus"
        yield Diagnosis(name="cluster.nodes", status="fail", text=text, remedy=remedy)
    if conf.program.kind in BUILT_IN and conf.train.compile:
        names = (image.environment.get("CC", ""), *COMPILERS)
        if not any(find_program(image.contents, image.environment, n) for n in names if n):
            text = "torch.compile needs a C compiler, and the image has none on its PATH"
            yield Diagnosis(name="train.compile", status="fail", text=text, remedy=_INSTALL)


def _judge_profile(conf: JobConf, written: Collection[str], image: Image) -> Iterator[Diagnosis]:
    for name, is_asked in (("nsys", conf.profile.nsys), ("ncu", conf.profile.ncu)):
        if is_asked and not find_program(image.contents, image.environment, name):
            remedy = "install it, or mount the node's own and name its folder in env.PATH"
            text = f"{name} is not on the image's PATH"
            yield Diagnosis(name=f"profile.{name}", status="fail", text=text, remedy=remedy)
    is_watched = conf.profile.timeline and "profile.timeline" in written
    lacks = find_lacks(image.software, {"python": TIMELINE})
    if is_watched and lacks and conf.program.kind not in BUILT_IN and image.software.python_version:
        text = f"a timeline of other engines needs {lacks[0]}; ranks train without it"
        yield Diagnosis(name="profile.timeline", status="warn", text=text)


def _judge_tools(conf: JobConf, image: Image) -> Iterator[Diagnosis]:
    """A tracker that is missing ends no run, and the run is not tracked."""
    tools = (("wandb", conf.track.wandb, ("wandb",)),
             ("mlflow", conf.track.mlflow, ("mlflow", "mlflow-skinny")))  # fmt: skip
    for name, asked, packages in tools:
        if asked is not None and not any(each in image.software.packages for each in packages):
            text = f"the image's Python has no {' or '.join(packages)}: nothing is sent there"
            yield Diagnosis(name=f"track.{name}", status="warn", text=text, remedy=_INSTALL)


def _is_mounted(conf: JobConf, path: str) -> bool:
    """Below a folder that the conf mounts: it is known on the nodes alone."""
    targets = [mount.split(":")[1].rstrip("/") for mount in conf.container.mounts if ":" in mount]
    return any(target and (path == target or path.startswith(f"{target}/")) for target in targets)
