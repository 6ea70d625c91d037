"""Known lines that the kernel and drivers write about a node and its GPUs."""

from __future__ import annotations

from functools import partial

from varuna_core.facts.catalogue.known_line import Proof, Scope, make_row
from varuna_core.facts.catalogue.remedies import (
    EXCLUDE,
    EXCLUDE_IF_ALONE,
    TELL_ADMIN,
    ask_admin,
    do,
    tell_admin,
)
from varuna_core.facts.hardware import XID_REMEDIES, Xid, match_xid

cause = partial(make_row, Scope.NODE, Proof.CAUSE)
fallout = partial(make_row, Scope.NODE, Proof.FALLOUT)
warning = partial(make_row, Scope.NODE, Proof.WARNING)

ROWS = (
    fallout(
        "xid cleanup",
        match_xid(Xid.CLEANUP),
        "a process died while it used the GPU",
        do(XID_REMEDIES[Xid.CLEANUP]),
    ),
    warning(
        "link notice",
        r"\bXid \([^)]{1,40}\): 1\d\d, \w{1,24} Nonfatal\b",
        "a link between GPUs had an error that it recovered from",
        tell_admin(", if it happens again"),
    ),
    warning(
        "xid notice",
        match_xid(Xid.NOTICE),
        "memory of this GPU was remapped",
        tell_admin(", who should drain the node if it happens again"),
    ),
    cause(
        "program xid",
        match_xid(Xid.PROGRAM),
        "most often the program's own bad access to GPU memory",
        do(XID_REMEDIES[Xid.PROGRAM]),
        EXCLUDE_IF_ALONE,
        fatal=True,
    ),
    cause(
        "off the bus",
        r"fallen off the bus|\bGPU is lost\b|[Uu]nable to determine the device handle",
        "the GPU is gone until its node is restarted",
        EXCLUDE,
        TELL_ADMIN,
        fatal=True,
    ),
    cause(
        "ecc",
        r"(?i)uncorrectable (ECC|NVLink|memory)|double[- ]bit ECC|uncorrected ECC"
        rf"|{match_xid(Xid.MEMORY)}",
        "the memory of this GPU is faulty",
        EXCLUDE,
        TELL_ADMIN,
        fatal=True,
    ),
    cause(
        "nvlink",
        r"(?i)NVLink\b.{0,60}\b(fatal|error|failed|failure|down)\b|SXid \("
        rf"|{match_xid(Xid.LINK)}"
        r"|fabric ?manager\b.{0,40}\b(error|failed|not running)|cudaErrorSystemNotReady"
        r"|CUDA error: system not yet initialized",
        "links between the GPUs of this node fail",
        EXCLUDE,
        ask_admin("to look at `nvidia-smi nvlink -e` and the fabric manager"),
        fatal=True,
    ),
    cause(
        "xid",
        r"\bXid \(.*?\): \d",
        "the driver reports a fault of this GPU",
        EXCLUDE,
        tell_admin("the number of the fault (Xid)"),
        fatal=True,
    ),
    cause(
        "pcie",
        r"PCIe Bus Error: severity=Uncorrect|pcieport\b.*\bUncorrect",
        "the link to this GPU or network card fails",
        EXCLUDE,
        fatal=True,
    ),
    cause(
        "overheated",
        r"(?i)\boverheat(ed|ing)\b|thermal (shutdown|trip|violation)|critical temperature reached",
        "the cooling of this node fails",
        EXCLUDE,
        TELL_ADMIN,
        fatal=True,
    ),
    warning(
        "hot",
        r"(?i)temperature (is )?above threshold|(HW|SW|hardware|software) thermal slowdown",
        "the node slows down because of heat",
        TELL_ADMIN,
    ),
    warning(
        "file server",
        r"(nfs|lustre|LustreError).*\bnot responding\b|Connection to .* was lost; in progress",
        "the file server is slow or gone for now",
    ),
)
