"""What stands before a rank's command under NVIDIA's profilers.

Their output lies beside the rank's own: `attempt-<n>/ranks/<rank>.nsys-rep` or `.ncu-rep`.
Megatron-LM marks the steps to profile by itself (`--profile`); a script is profiled whole, unless
it calls torch.cuda.profiler.start() and `profile.options` says so.
"""

from __future__ import annotations

from vjob.jobs.conf.schema import JobConf

OUTPUT = "%{folder}/attempt-%{attempt}/ranks/%{rank}"


def build_prefix(conf: JobConf, *, marks_steps: bool) -> tuple[str, ...]:
    """The profiler with its options; empty where none was asked for."""
    profile = conf.profile
    if profile.nsys:
        capture = ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
        # No sampling of CPUs: it needs rights that clusters do not give.
        words = ["nsys", "profile", f"--output={OUTPUT}", "--force-overwrite=true"]
        words += ["--trace=cuda,nvtx,osrt", "--sample=none", "--cpuctxsw=none"]
    elif profile.ncu:
        capture = ["--profile-from-start=off"]
        words = ["ncu", f"--export={OUTPUT}", "--force-overwrite", "--target-processes=all"]
    else:
        return ()
    options = [word.replace("%{", "%{percent}{") for word in profile.options]
    return (*words, *(capture if marks_steps else ()), *options)
