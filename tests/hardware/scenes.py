"""Scenes of hardware: the texts of the tools by version, and what is to be said of each.

Two nodes with two ranks train. n0 is well, with as many GPUs by NVML; n1 is the scene's, and its
ranks 2 and 3 are on its GPUs 0 and 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.hardware.stand_ins import (
    AMDGPU,
    IB,
    ROWS,
    list_slices,
    make_amd,
    make_bus,
    make_ethernet,
    make_memory,
    make_nvml,
    make_ports,
    make_slices,
    make_smi,
    make_xpu,
)

Files = Mapping[str, str | None]
BOTH = {"0": 81559.0, "1": 81559.0}
APPS = {0: 2, 1: 3}
XPU = {"0": 131072.0, "1": 131072.0}
MI300 = {"0": 196608.0, "1": 196608.0}


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What the tools answer, and what vjob is to say."""

    name: str
    tool: str
    before: Files
    """On n1 at the start."""
    now: Files = field(default_factory=dict)
    """Over `before`, what is wrong from the start."""
    after: Files = field(default_factory=dict)
    """On n1 after its first sample."""
    kernel: tuple[str, ...] = ()
    """Lines that the kernel of n1 logs then."""
    gpus: int = 2
    env: Mapping[str, str] = field(default_factory=dict)
    """Of the agents, such as CUDA_VISIBLE_DEVICES."""
    stops: bool = False
    """The ranks make no step after the change."""
    health: str = "HEALTHY"
    verdict: str = ""
    """Pattern of the verdict's sentence, where the health is none of a healthy run."""
    remarks: tuple[str, ...] = ()
    """Patterns of the remarks; there are no others."""
    faults: tuple[Mapping[str, Any], ...] = ()
    """Values of the faults of n1 that status and report have; there are no others."""
    shown: Mapping[str, float | None] = field(default_factory=lambda: BOTH)
    """The memory of each GPU of n1 that status shows."""
    report: tuple[str, ...] = ()
    """Patterns that the report's text has beside the sentences of the faults."""

    @property
    def needs_root(self) -> bool:
        """True where a tree has to be mounted over /sys, or a file over the kernel's log."""
        files = [*self.before, *self.now, *self.after]
        return bool(self.kernel) or any(name.startswith("sys/") for name in files)


def fault(rule: str, part: str, **more: Any) -> dict[str, Any]:
    return {"rule": rule, "part": part, **more}


def xid(code: int, text: str, index: int = 1) -> tuple[str, ...]:
    return (f"NVRM: Xid (PCI:0000:{make_bus(index)}:00): {code}, {text}",)


def on_kernel(code: int, text: str, words: str, tool: str = "NVRM 550.54", **more: Any) -> Scene:
    """A scene of a line of NVIDIA's driver in the kernel's log, while steps go on."""
    return Scene(
        name=f"Xid {code}",
        tool=tool,
        before=make_smi(apps=APPS),
        kernel=xid(code, text),
        remarks=(rf"GPU 1 of n1 \(rank 3\) had Xid {code}: {words}",),
        faults=(fault("gpu-xid", "1", code=code, ranks=[3], ranks_sure=True),),
        **more,
    )


BLIND = "the state of the GPUs of n1 is not known"
LOST = (
    f"Unable to determine the device handle for GPU 0000:{make_bus(1).upper()}:00.0: GPU is lost.  "
    "Reboot the system to recover this GPU"
)
A100 = "NVIDIA A100-SXM4-40GB"
MIGS = ("MIG-3f0e1a52-0000-5000-8000-00000000000a", "MIG-3f0e1a52-0000-5000-8000-00000000000b")
"""The uuids of two slices."""
IN_SLICES = make_smi(
    1,
    every={"name": A100, "memory.total": "40960", "memory.used": "14311",
           "utilization.gpu": "[N/A]"},
    states={0: make_slices(((1, 11020, 20096), (2, 3291, 20096)), (("PID0", 1), ("PID1", 2)))},
    links={},
    list=list_slices(0, A100, (("3g.20gb", MIGS[0]), ("3g.20gb", MIGS[1]))),
    apps={},
)  # fmt: skip
IN_SEVEN = make_smi(
    1,
    every={"name": A100, "memory.total": "40960", "utilization.gpu": "[N/A]"},
    states={0: make_slices([(7 + at, 4000 + at, 4864) for at in range(7)],
                           (("PID0", 8), ("PID1", 10)))},
    links={},
    list=list_slices(0, A100, [("1g.5gb", f"MIG-aa0{at}") for at in range(7)]),
    apps={},
)  # fmt: skip
GB10 = {"name": "NVIDIA GB10", "memory.used": "[N/A]", "memory.total": "[N/A]",
        "ecc.errors.uncorrected.volatile.total": "[N/A]"}  # fmt: skip
GRACE = {"name": "NVIDIA GH200 480GB", "memory.total": "97871", "memory.used": "90011"}
VGPU = {
    "name": "GRID A100D-20C", "temperature.gpu": "N/A", "power.draw": "[N/A]",
    "memory.total": "20480", "memory.used": "9100", "clocks_event_reasons.active": "[N/A]",
    "clocks_throttle_reasons.active": "[N/A]",
    "ecc.errors.uncorrected.volatile.total": "[N/A]",
}  # fmt: skip
OLD = {
    "name": "Tesla P100-PCIE-16GB",
    "memory.total": "16280",
    "memory.used": "14012",
    "utilization.gpu": "99",
}
CONSUMER = {
    "name": "NVIDIA GeForce RTX 3090", "memory.total": "24576", "memory.used": "21000",
    "ecc.errors.uncorrected.volatile.total": "[N/A]", "clocks_event_reasons.active":
    "0x0000000000000004",
}  # fmt: skip


def hold(bits: int) -> dict[str, str]:
    word = f"0x{bits:016x}"
    return {"clocks_event_reasons.active": word, "clocks_throttle_reasons.active": word}


SCENES = (
    # What is odd and well: no remark.
    Scene(
        name="8 GPUs, all well", tool="nvidia-smi 550.54", gpus=8,
        before=make_smi(8, apps=APPS), shown={str(at): 81559.0 for at in range(8)},
    ),
    Scene(
        name="16 GPUs", tool="nvidia-smi 450.80", gpus=16,
        before=make_smi(16, every={"name": "Tesla V100-SXM3-32GB", "memory.total": "32510",
                                   "memory.used": "30000"}, older=True, apps=APPS,
                        links={at: ["25.781 GB/s"] * 6 for at in range(16)}),
        shown={str(at): 32510.0 for at in range(16)},
    ),
    Scene(
        name="memory [N/A] (GB10)", tool="nvidia-smi 580.95",
        before=make_smi(1, every=GB10, links={}, apps={0: 2}), gpus=1, shown={"0": None},
    ),
    Scene(
        name="Grace Hopper", tool="nvidia-smi 570.86", gpus=1,
        before=make_smi(1, every=GRACE, links={0: ["<inactive>"] * 18}, apps={0: 2}),
        shown={"0": 97871.0},
    ),
    Scene(
        name="vGPU", tool="nvidia-smi 535.129", gpus=1,
        before=make_smi(1, every=VGPU, links={}, states={0: ""}, apps={0: 2}),
        shown={"0": 20480.0},
    ),
    Scene(
        name="[Not Supported] (older driver)", tool="nvidia-smi 418.226",
        before=make_smi(every={**OLD, "power.draw": "[Not Supported]",
                               "ecc.errors.uncorrected.volatile.total": "[Not Supported]"},
                        older=True, links={}, states={0: "", 1: ""}),
        shown={"0": 16280.0, "1": 16280.0},
    ),
    Scene(
        name="a consumer card at its power cap", tool="nvidia-smi 550.54",
        before=make_smi(every=CONSUMER, links={}, apps=APPS),
        shown={"0": 24576.0, "1": 24576.0},
    ),
    Scene(
        name="full load at the power cap", tool="nvidia-smi 535.161",
        before=make_smi(every={**hold(0x4), "power.draw": "699.80", "utilization.gpu": "100"},
                        apps=APPS),
    ),
    Scene(
        name="idle, and clocks set by an admin", tool="nvidia-smi 535.161",
        before=make_smi(every=hold(0x1), apps=APPS),
    ),
    Scene(
        name="persistence off", tool="nvidia-smi 525.60",
        before=make_smi(apps=APPS, states={
            at: "<persistence_mode>Disabled</persistence_mode>"
            + ROWS.format(pending="No", failure="No") for at in range(2)}),
    ),
    Scene(
        name="errors of an earlier job (aggregate)", tool="nvidia-smi 550.54",
        before=make_smi(apps=APPS, states={
            at: "<ecc_errors><volatile><dram_uncorrectable>0</dram_uncorrectable></volatile>"
            "<aggregate><dram_uncorrectable>71</dram_uncorrectable></aggregate></ecc_errors>"
            + ROWS.format(pending="No", failure="No") for at in range(2)}),
    ),
    Scene(
        name="NVLinks of a PCIe card without a bridge", tool="nvidia-smi 570.133",
        before=make_smi(every={"name": "NVIDIA A100 80GB PCIe", "memory.total": "81920"},
                        links={at: ["<inactive>"] * 12 for at in range(2)}, apps=APPS),
        shown={"0": 81920.0, "1": 81920.0},
    ),
    # Slices.
    Scene(
        name="MIG: two slices, by their uuids", tool="nvidia-smi 535.129", gpus=2,
        before=IN_SLICES, env={"CUDA_VISIBLE_DEVICES": ",".join(MIGS)},
        shown={"0:0": 20096.0, "0:1": 20096.0},
    ),
    Scene(
        name="MIG: ours are two of seven", tool="nvidia-smi 550.54", gpus=2,
        before=IN_SEVEN, env={"CUDA_VISIBLE_DEVICES": "MIG-aa01,MIG-aa03"},
        shown={"0:1": 4864.0, "0:3": 4864.0},
    ),
    Scene(
        name="MIG: a contained error in one slice", tool="NVRM 535.129", gpus=2,
        before=IN_SLICES, env={"CUDA_VISIBLE_DEVICES": ",".join(MIGS)},
        shown={"0:0": 20096.0, "0:1": 20096.0},
        kernel=(f"NVRM: Xid (PCI:0000:{make_bus(0)}:00 GPU-I:01): 94, pid=7194, Contained: CE "
                "User Channel (0x9). RST: No, D-RST: No",),
        remarks=(r"GPU 0 of n1 \(ranks 2, 3\) had Xid 94: an error in the memory of "
                 "this GPU ended",),
        faults=(fault("gpu-xid", "0", code=94, ranks=[2, 3]),),
    ),
    # Lost, or not to be read.
    Scene(
        name="lost: the survivors are printed", tool="nvidia-smi 550.54",
        before=make_smi(apps=APPS), after={**make_smi(apps=APPS, gone=[1]), "smi/end": LOST,
                                           "smi/code": "15"},
        health="FAILING", verdict=r"GPU 1 of n1 \(rank 3\) is lost: the driver cannot reach it, "
        r"and reads 1 of 2", shown={"0": 81559.0},
        faults=(fault("gpu-lost", "1", ranks=[3], ranks_sure=True),),
    ),
    Scene(
        name="lost: nothing is printed of the others", tool="nvidia-smi 470.57",
        before=make_smi(apps=APPS, older=True),
        after={"smi/all": LOST.replace("GPU 0000", "GPU0000").partition(": GPU is")[0]
               + ": Unknown Error", "smi/code": "255"},
        health="FAILING", verdict=r"GPU 1 of n1 \(rank 3\) is lost", shown={"0": 81559.0},
        faults=(fault("gpu-lost", "1", ranks=[3]),),
    ),
    Scene(
        name="lost, by NVML", tool="pynvml 12.535",
        before=make_nvml(), after=make_nvml(changes={1: {"lost": True}}),
        health="FAILING", verdict=r"GPU 1 of n1 \(rank 3, if ranks take GPUs in order\) is lost",
        shown={"0": 81559.0}, faults=(fault("gpu-lost", "1", ranks=[3], ranks_sure=False),),
    ),
    Scene(
        name="driver and library differ", tool="nvidia-smi 535.129", before=make_smi(apps=APPS),
        after={"smi/all": "Failed to initialize NVML: Driver/library version mismatch\n"
             "NVML library version: 535.129", "smi/code": "18"},
        health="RUNNING", verdict=BLIND,
        remarks=(r"GPUs not read: n1: nvidia-smi: Failed to initialize NVML: Driver/library",),
        shown={}, report=(r"GPUs of n1 were not read in \d+ samples.*mismatch",),
    ),
    Scene(
        name="the driver stopped answering", tool="nvidia-smi 525.60", before=make_smi(apps=APPS),
        after={"smi/all": "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA "
               "driver. Make sure that the latest NVIDIA driver is installed and running.",
               "smi/code": "9"},
        health="RUNNING", verdict=BLIND,
        remarks=(r"GPUs not read: n1: nvidia-smi: NVIDIA-SMI has failed",), shown={},
        report=(r"GPUs of n1 were not read in \d+ samples.*has failed",),
    ),
    Scene(
        name="the tool hangs", tool="nvidia-smi 550.54", before=make_smi(apps=APPS),
        after={"smi/hang": ""},
        health="RUNNING", verdict=BLIND,
        remarks=(r"GPUs not read: n1: nvidia-smi: no answer in 10 s",), shown={},
        report=(r"GPUs of n1 were not read in \d+ samples?.*no answer in 10 s",),
    ),
    # The kernel's log.
    Scene(
        name="Xid 79, and no step since", tool="NVRM 550.54", before=make_smi(apps=APPS),
        kernel=xid(79, "pid='<unknown>', name=<unknown>, GPU has fallen off the bus."),
        after={**make_smi(apps=APPS, gone=[1]), "smi/end": LOST, "smi/code": "15"},
        stops=True, health="FAILING", verdict=r"GPU 1 of n1 \(rank 3\) is lost",
        shown={"0": 81559.0},
        remarks=(r"GPU 1 of n1 \(rank 3\) had Xid 79: the GPU has fallen off the bus",),
        faults=(fault("gpu-lost", "1", ranks=[3]), fault("gpu-xid", "1", code=79, ranks=[3])),
    ),
    on_kernel(48, "pid=4021, name=python, DBE (double bit error) ECC Error", "an uncorrected "
              "error in the memory of this GPU"),
    on_kernel(63, "pid='<unknown>', name=<unknown>, Row Remapper: New row (0x7f2) marked for "
              "remapping, reset gpu to activate.", "a row of the GPU's memory will be"),
    on_kernel(64, "pid=1201, name=python, Row Remapper: Error, row remapping failed",
              "a row of the GPU's memory could not be replaced"),
    on_kernel(74, "pid=4021, name=python, NVLink: fatal error detected on link 6(0x10000, 0x0)",
              "a link to other GPUs failed", "NVRM 535.161"),
    on_kernel(95, "pid=1, Uncontained: FBHUB. RST: Yes, D-RST: No", "an error in the memory of "
              "this GPU may have affected other programs", "NVRM 570.86"),
    on_kernel(119, "pid=8123, name=nvidia-smi, Timeout after 6s of waiting for RPC response from "
              "GPU1 GSP! Expected function 76 (GSP_RM_CONTROL)", "the GPU's own processor "
              r"\(GSP\) does not answer", "NVRM 535.54"),
    on_kernel(31, "pid=4021, name=python, Ch 00000008, intr 10000000. MMU Fault: ENGINE GRAPHICS "
              "faulted @ 0x7f2b_a0000000.", "most often the program's own access"),
    on_kernel(13, "pid='<unknown>', name=<unknown>, Graphics SM Warp Exception on (GPC 3, TPC 1, "
              "SM 0): Out Of Range Address", "most often the program's own access"),
    Scene(
        name="an Xid of another job's GPU", tool="NVRM 550.54", before=make_smi(apps=APPS),
        kernel=(f"NVRM: Xid (PCI:0000:{make_bus(5)}:00): 79, GPU has fallen off the bus.",),
    ),
    Scene(
        name="Xids without a readable kernel log", tool="pynvml 12.570", before=make_nvml(),
        after=make_nvml(xids=[(1, 94), (1, 94)]),
        remarks=(r"GPU 1 of n1 \(rank 3, if ranks take GPUs in order\) had Xid 94, 2 times",),
        faults=(fault("gpu-xid", "1", code=94, count=2),),
    ),
    # Memory and links.
    Scene(
        name="uncorrected errors grow (volatile)", tool="nvidia-smi 535.161",
        before=make_smi(apps=APPS),
        after=make_smi(changes={1: {"ecc.errors.uncorrected.volatile.total": "2"}}, apps=APPS),
        remarks=(r"GPU 1 of n1 \(rank 3\) has 2 uncorrected ECC errors of this run",),
        faults=(fault("gpu-ecc", "1", count=2, ranks=[3]),),
    ),
    Scene(
        name="uncorrected errors of before the run", tool="nvidia-smi 535.161",
        before=make_smi(apps=APPS),
        now=make_smi(changes={1: {"ecc.errors.uncorrected.volatile.total": "3"}}, apps=APPS),
        remarks=(r"GPUs with uncorrected ECC errors: n1:1 \(rank 3\)",),
    ),
    Scene(
        name="a row waits to be replaced", tool="nvidia-smi 550.54", before=make_smi(apps=APPS),
        now=make_smi(apps=APPS, states={1: ROWS.format(pending="Yes", failure="No")}),
        remarks=(r"GPU 1 of n1 \(rank 3\) will replace a row of its memory at its next reset",),
        faults=(fault("gpu-remap", "1", detail="pending"),),
    ),
    Scene(
        name="a row could not be replaced", tool="pynvml 12.535", before=make_nvml(),
        after=make_nvml(changes={0: {"rows": [0, 8, 0, 1]}}),
        remarks=(r"GPU 0 of n1 \(rank 2, .*\) has a row of memory that could not be replaced",),
        faults=(fault("gpu-remap", "0", detail="failed"),),
    ),
    Scene(
        name="the driver asks for a reset", tool="nvidia-smi 580.82", before=make_smi(apps=APPS),
        after=make_smi(apps=APPS, states={
            0: "<gpu_recovery_action>Drain and Reset</gpu_recovery_action>"}),
        remarks=(r"GPU 0 of n1 \(rank 2\) needs a repair: its driver asks for Drain and Reset",),
        faults=(fault("gpu-reset", "0", detail="Drain and Reset"),),
    ),
    Scene(
        name="an NVLink goes down", tool="nvidia-smi 535.161", before=make_smi(apps=APPS),
        after=make_smi(apps=APPS, links={
            0: ["26.562 GB/s"] * 18,
            1: [*["26.562 GB/s"] * 15, *["<inactive>"] * 3]}),
        remarks=(r"GPU 1 of n1 \(rank 3\) has 3 of 18 NVLinks down",),
        faults=(fault("gpu-nvlink", "1", count=3, ranks=[3]),),
    ),
    Scene(
        name="NVLinks down from the start, of one of four", tool="nvidia-smi 450.80", gpus=4,
        before=make_smi(4, older=True, apps=APPS,
                        links={at: ["25.781 GB/s"] * 6 for at in range(4)}),
        now=make_smi(4, older=True, apps=APPS, links={
            **{at: ["25.781 GB/s"] * 6 for at in range(4)},
            3: [*["25.781 GB/s"] * 4, "<inactive>", "<inactive>"]}),
        remarks=(r"GPU 3 of n1 has 2 of 6 NVLinks down",),
        faults=(fault("gpu-nvlink", "3", count=2),),
        shown={str(at): 81559.0 for at in range(4)},
    ),
    Scene(
        name="errors of NVLinks grow", tool="pynvml 11.450", before=make_nvml(),
        after=make_nvml(changes={1: {"link_errors": 2}}),
        remarks=(r"GPU 1 of n1 .* has 72 errors of NVLinks",),
        faults=(fault("gpu-nvlink-errors", "1", count=72),),
    ),
    # Clocks.
    Scene(
        name="thermal slowdown", tool="nvidia-smi 550.54", before=make_smi(apps=APPS),
        now=make_smi(changes={1: {**hold(0x48), "temperature.gpu": "86"}}, apps=APPS),
        remarks=(r"GPUs with held down \(hw_slowdown, hw_thermal\): n1:1 \(rank 3\)",),
        report=(r"GPU 1 of n1 ran with its clock held down",),
    ),
    Scene(
        name="hot", tool="nvidia-smi 550.54", before=make_smi(apps=APPS),
        now=make_smi(changes={1: {"temperature.gpu": "93"}}, apps=APPS),
        remarks=(r"GPUs with 88 degrees or more: n1:1 \(rank 3\)",),
        report=(r"GPU 1 of n1 ran with its clock held down|at up to 93",),
    ),
    Scene(
        name="hardware slowdown (power brake)", tool="nvidia-smi 470.57",
        before=make_smi(apps=APPS, older=True),
        now=make_smi(changes={0: hold(0x88)}, apps=APPS, older=True),
        remarks=(r"GPUs with held down \(hw_slowdown, hw_power_brake\): n1:0 \(rank 2\)",),
        report=(r"GPU 0 of n1 ran with its clock held down",),
    ),
    # AMD.
    Scene(
        name="MI300X, well", tool="amdgpu of Linux 6.8", before=make_amd(), shown=MI300,
    ),
    Scene(
        name="MI300X in partitions (CPX)", tool="amdgpu of Linux 6.8", gpus=8,
        before=make_amd(1, parts=8), shown={str(at): None for at in range(8)},
    ),
    Scene(
        name="a GPU leaves the bus", tool="amdgpu of Linux 6.8", before=make_amd(),
        after={f"{AMDGPU}/0000:{make_bus(1)}:00.0/{name}": None
               for name in (*(make_amd(1) and ("vendor",)), "gpu_busy_percent",
                            "mem_info_vram_total", "mem_info_vram_used", "product_name",
                            "ras/umc_err_count", "hwmon/hwmon5/temp2_label",
                            "hwmon/hwmon5/temp2_input", "hwmon/hwmon5/power1_input")},
        health="FAILING", verdict=r"GPU 1 of n1 \(rank 3, if ranks take GPUs in order\) is lost",
        shown={"0": 196608.0}, faults=(fault("gpu-lost", "1", ranks=[3]),),
    ),
    Scene(
        name="uncorrectable errors (RAS)", tool="amdgpu of Linux 6.8", before=make_amd(),
        after={f"{AMDGPU}/0000:{make_bus(1)}:00.0/ras/umc_err_count": "ue: 1\nce: 9"},
        shown=MI300,
        remarks=(r"GPU 1 of n1 \(rank 3, .*\) has 1 uncorrected ECC errors of this run",),
        faults=(fault("gpu-ecc", "1", count=1),),
    ),
    Scene(
        name="a reset in the kernel's log", tool="amdgpu of Linux 6.2", before=make_amd(),
        kernel=(f"amdgpu 0000:{make_bus(0)}:00.0: amdgpu: uncorrectable hardware error"
                "(ERREVENT_ATHUB_INTERRUPT) detected!",
                f"amdgpu 0000:{make_bus(0)}:00.0: amdgpu: GPU reset begin!"),
        shown=MI300,
        remarks=(r"GPU 0 of n1 \(rank 2, .*\) had errors in the kernel's log: uncorrectable error",
                 r"GPU 0 of n1 \(rank 2, .*\) had errors in the kernel's log: reset"),
        faults=(fault("gpu-kernel", "0", detail="uncorrectable error"),
                fault("gpu-kernel", "0", detail="reset")),
    ),
    # Intel.
    Scene(name="Max 1550, well", tool="xpu-smi 1.2.36", before=make_xpu(), shown=XPU),
    Scene(
        name="Max 1550 without load (N/A)", tool="xpu-smi 1.2.39",
        before=make_xpu(rows=dict.fromkeys(range(2), " N/A, 281.13, 35.50,  N/A,  N/A")),
        shown=XPU,
    ),
    Scene(
        name="a GPU without a row", tool="xpu-smi 1.2.36", before=make_xpu(),
        after=make_xpu(rows={1: ""}), health="FAILING",
        verdict=r"GPU 1 of n1 \(rank 3, if ranks take GPUs in order\) is lost",
        shown={"0": 131072.0}, faults=(fault("gpu-lost", "1"),),
    ),
    Scene(
        name="Level Zero does not start", tool="xpu-smi 1.2.36", before=make_xpu(),
        after={"xpu/all": "Error: Level Zero Initialization Error"}, shown={},
        health="RUNNING", verdict=BLIND,
        remarks=(r"GPUs not read: n1: xpu-smi dump: Error: Level Zero Initialization Error",),
        report=(r"GPUs of n1 were not read in \d+ samples.*Level Zero",),
    ),
    # Networks and the node's memory.
    Scene(
        name="InfiniBand, well, with old errors", tool="Linux 6.8",
        before={**make_smi(apps=APPS), **make_ports(), **make_ethernet(), **make_memory()},
    ),
    Scene(
        name="a port of InfiniBand goes down", tool="Linux 6.8",
        before={**make_smi(apps=APPS), **make_ports()},
        after=make_ports(changes={2: {"state": "1: DOWN", "phys_state": "2: Polling",
                                      "counters/link_downed": "2"}}),
        remarks=(r"mlx5_2/1 of n1 has lost its link",
                 r"mlx5_2/1 of n1 counts errors: link_downed grew by 1"),
        faults=(fault("port-down", "mlx5_2/1"), fault("port-errors", "mlx5_2/1", count=1)),
    ),
    Scene(
        name="a port slower than its equals", tool="Linux 6.8",
        before={**make_smi(apps=APPS), **make_ports()},
        now=make_ports(changes={1: {"rate": "100 Gb/sec (4X EDR)"}}),
        remarks=(r"mlx5_1/1 of n1 runs at 100 of 400 Gbit/s",),
        faults=(fault("port-slow", "mlx5_1/1"),),
    ),
    Scene(
        name="retransmits grow", tool="Linux 5.15",
        before={**make_smi(apps=APPS), **make_ports()},
        after={f"{IB.format(at=3)}/ports/1/hw_counters/local_ack_timeout_err": "37"},
        remarks=(r"mlx5_3/1 of n1 counts errors: local_ack_timeout_err grew by 33",),
        faults=(fault("port-errors", "mlx5_3/1", count=33, detail="local_ack_timeout_err"),),
    ),
    Scene(
        name="Ethernet: the carrier came and went", tool="Linux 6.8",
        before={**make_smi(apps=APPS), **make_ethernet()}, after=make_ethernet(carrier_changes="4"),
        remarks=(r"ens1 of n1 counts errors: carrier_changes grew by 2",),
        faults=(fault("port-errors", "ens1", count=2),),
    ),
    Scene(
        name="errors of the node's memory", tool="Linux 6.8",
        before={**make_smi(apps=APPS), **make_memory()}, after=make_memory(ue_count="1"),
        remarks=(r"mc0 of n1 \(memory\) counts errors: ue_count grew by 1",),
        faults=(fault("host-memory", "mc0", count=1),),
    ),
)  # fmt: skip
