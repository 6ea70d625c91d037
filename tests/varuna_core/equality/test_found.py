"""What the machine found: the smallest draw that showed it, by name."""

from __future__ import annotations

import pytest

from tests.varuna_core.equality.spec import Block, Layout, Spec
from tests.varuna_core.equality.worlds import Worlds


def blocks(*kinds: str) -> tuple[Block, ...]:
    """A word a block; a bar before it is a cut."""
    return tuple(
        Block(kind=kind.lstrip("|"), form="one" if kind.startswith("|") else None) for kind in kinds
    )


FOUND = {
    "a dry run on values leaves batch norm's averages alone in half precision": Spec(
        blocks=blocks("|norm", "|branch"), layout=Layout(), precision="fp16"
    ),
    "a branch that the dry run did not take trains where it lies": Spec(
        blocks=blocks("|branch", "|linear"),
        layout=Layout(pipeline=2, partition="2-1"),
        batch_size=3,
        batches=(3, 2, 1),
        chunk_size=1,
        seed=2,
    ),
    "a branch on a word among the inputs trains where it lies": Spec(
        blocks=blocks("|switch", "|linear"), layout=Layout(pipeline=2, partition="2-1")
    ),
    "what a linear layer gives may be changed in place where products are put off": Spec(
        blocks=blocks("|linear", "in_place"), layout=Layout(schedule="zero_bubble")
    ),
    "dropout falls alike on what crossed a cut in another memory order": Spec(
        blocks=blocks("conv", "|dropout"), layout=Layout(pipeline=2, partition="1-1")
    ),
    "gradients that zbv puts off round as the plain model's in half precision": Spec(
        blocks=blocks("|linear", "|conv", "|mlp", "|attention"),
        layout=Layout(pipeline=2, schedule="zbv", stages_per_rank=2),
        precision="fp16",
    ),
    "a dealt share of the size of an even one is the dealt one": Spec(
        blocks=blocks("|dropout"), layout=Layout(data=4), chunk_size=3
    ),
    "replicas may take other branches with zero 3": Spec(
        blocks=blocks("|linear", "branch"), layout=Layout(data=2, zero=3)
    ),
    "a plain number of a module is as it was after the checks": Spec(
        blocks=blocks("|calls", "|average"), layout=Layout(pipeline=2, partition="1-2")
    ),
    "a plain tensor of a module is replayed by a recompute": Spec(
        blocks=blocks("|average"), layout=Layout(recompute="full"), batch_size=6, batches=(6, 6, 6)
    ),
    "a module's own stream is replayed by a recompute": Spec(
        blocks=blocks("|stream", "|calls"), layout=Layout(recompute="selective")
    ),
    "numpy's stream does not depend on the layout": Spec(
        blocks=blocks("|foreign", "|foreign"),
        layout=Layout(pipeline=2, partition="1-2", schedule="gpipe", recompute="full"),
    ),
    "a list that crossed a cut may be popped from": Spec(
        blocks=(Block(kind="linear", form="popped"), Block(kind="extra", form="popped")),
        layout=Layout(pipeline=2, partition="2-1"),
    ),
    "a computed weight is read by the forward alone": Spec(
        blocks=blocks("|spectral"), layout=Layout(schedule="zero_bubble")
    ),
    "what DTensor saves in its own dry runs is not copied out": Spec(
        blocks=blocks("mlp", "dropout", "|linear"),
        layout=Layout(tensor=2, schedule="gpipe", partition="2", recompute="offload"),
    ),
    "a result that a buffer of the stage changes from run to run is no leak": Spec(
        blocks=blocks("|count"), layout=Layout(pipeline=2, partition="1-1")
    ),
    "several optimizers are saved, and taken up by another layout": Spec(
        blocks=blocks("|mlp", "|norm"),
        layout=Layout(pipeline=2, partition="1-2"),
        other=Layout(data=2, zero=2),
        precision="fp16",
        optimizer="several",
    ),
    "a forked child that collects and ends harms nobody": Spec(
        blocks=blocks("|linear"), layout=Layout(pipeline=2, partition="1-1"), forks=True
    ),
    "weights that hooks compute are no obstacle to a copy": Spec(
        blocks=blocks("|pruned", "|old_norm"),
        layout=Layout(pipeline=2, partition="2-1", schedule="zero_bubble"),
    ),
    "flex attention is recomputed in full": Spec(
        blocks=blocks("|flex"), layout=Layout(recompute="selective")
    ),
    "a graph that torch lets nobody see is not measured": Spec(
        blocks=blocks("|inner_grad"), layout=Layout(recompute="auto", memory_limit=8000.0)
    ),
    "a gradient within the forward is recomputed in full": Spec(
        blocks=(
            Block(kind="norm", form="edited"),
            Block(kind="count", form="nested"),
            Block(kind="norm", form="edited"),
            Block(kind="inner_grad", form="popped"),
            Block(kind="branch", form="edited"),
            Block(kind="detached", form="popped"),
        ),
        layout=Layout(pipeline=2, schedule="interleaved", recompute="selective", reverse=True),
        tokens=True,
        full_loss=True,
        hooks="after",
        chunk_size=1,
        optimizer="adamw",
        seed=3,
    ),
    "a weight without a gradient does not decay, sharded or not": Spec(
        blocks=blocks("|linear", "|flex"), layout=Layout(data=2, zero=3), optimizer="adamw"
    ),
    "a layer whose view is changed in place stays whole with zero 3": Spec(
        blocks=blocks("linear", "in_place", "|linear"), layout=Layout(data=2, zero=3)
    ),
    "a layer of complex numbers stays whole with zero 3": Spec(
        blocks=blocks("linear", "complex", "|linear"),
        layout=Layout(data=2, zero=3),
        precision="bf16",
    ),
    "a nested tensor stays where a graph is offloaded": Spec(
        blocks=blocks("|linear", "|ragged"),
        layout=Layout(schedule="gpipe", recompute="offload"),
        batch_size=3,
        batches=(2, 2, 3),
        chunk_size=1,
    ),
    "zeros that have no memory stay where a graph is offloaded": Spec(
        blocks=blocks("pushed", "|linear"),
        layout=Layout(schedule="gpipe", partition="2", recompute="offload"),
        batch_size=8,
        batches=(5, 8, 7),
    ),
    "a tensor that crosses a cut takes a gradient as a branch decides": Spec(
        blocks=blocks("switch", "|linear"),
        layout=Layout(pipeline=2, partition="1-1"),
        frozen=1,
    ),
    "what may take a gradient does where a forward is recomputed": Spec(
        blocks=blocks("switch", "|linear"),
        layout=Layout(pipeline=2, schedule="gpipe", partition="1-1", recompute="full"),
        frozen=1,
    ),
    "a product that a bias has changed unseen is made again": Spec(
        blocks=blocks("|norm", "|pushed"),
        layout=Layout(schedule="gpipe", recompute="selective"),
    ),
    "products of a dry run are not those of a forward": Spec(
        blocks=blocks("linear", "mlp_dropout", "branch", "|linear"),
        layout=Layout(
            pipeline=2, tensor=2, schedule="gpipe", partition="1-1", recompute="selective"
        ),
        batch_size=7,
        batches=(7, 7, 7),
        chunk_size=3,
    ),
    "a dict that crossed a cut may be edited": Spec(
        blocks=(Block(kind="linear", form="edited"), Block(kind="extra", form="edited")),
        layout=Layout(pipeline=2, partition="2-1"),
    ),
    "the gradient of a linear layer's input keeps its memory order": Spec(
        blocks=blocks("|norm", "|norm2d"),
        layout=Layout(schedule="gpipe"),
        precision="fp16",
        full_loss=True,
        batch_size=7,
        batches=(7, 7, 7),
        optimizer="adamw",
        seed=2,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_found_by_the_machine(worlds: Worlds, name: str) -> None:
    ((_, _, verdict),) = worlds.run([FOUND[name]])
    assert verdict.status == "equal", f"{verdict.message}\n{verdict.trace}"
